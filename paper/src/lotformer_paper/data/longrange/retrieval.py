"""Retrieval: do two documents belong together? AAN's paper pairs, or a stand-in from film reviews."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from lotformer.data.contents import files_digest, sha256
from lotformer.reading import read_lines, require_file

from .store import Shard, Tokens
from .text import CLASSES, ReviewFiles, as_bytes, read, review_number

_FILES = {"train": "train", "dev": "eval", "test": "test"}
_PER_SHARD = 2_500


@dataclass(frozen=True)
class PaperPairs:
    """The arena's AAN files `new_aan_pairs.{train,eval,test}.tsv`: label, two ids, two texts."""

    folder: Path

    task: ClassVar[str] = "retrieval"
    aliases: ClassVar[Mapping[str, str]] = {}

    def describe(self) -> dict[str, Any]:
        checksums = {split: sha256(self._file(split)) for split in _FILES}
        return {"task": self.task, "source": "AAN", "checksums": checksums}

    def shards(self) -> dict[str, int]:
        """One per file: lines have no index, and reading a file is quick."""
        return dict.fromkeys(_FILES, 1)

    def make(self, split: str, number: int) -> Shard:
        documents: list[Tokens] = []
        labels = []
        for label, first, second in self._pairs(self._file(split)):
            documents += [first, second]
            labels.append(label)
        if not labels:
            raise ValueError(f"{self._file(split)}: expected pairs of papers, found none.")
        examples = np.arange(len(documents), dtype=np.int32).reshape(-1, 2)
        return Shard(documents, examples, np.array(labels, np.uint8))

    def _pairs(self, path: Path) -> Iterator[tuple[int, Tokens, Tokens]]:
        require_file(path)
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                columns = line.rstrip(b"\r\n").split(b"\t")
                if len(columns) != 5 or columns[0] not in (b"0", b"1", b"0.0", b"1.0"):
                    raise ValueError(f"{path}, line {number}: expected label, two ids and two texts between tabs.")
                yield int(float(columns[0])), _unquoted(columns[3]), _unquoted(columns[4])

    def _file(self, split: str) -> Path:
        path = self.folder / f"new_aan_pairs.{_FILES[split]}.tsv"
        if not path.is_file():
            raise FileNotFoundError(f"no AAN {split} set: expected {path}.")
        return path


@dataclass(frozen=True)
class FilmPairs:
    """Another task of the same form, for where AAN cannot be had: are two reviews about the same film?

    Positive pairs are two reviews of one film. Negative pairs join the same first reviews with the second reviews of
    other pairs, rearranged within each combination of sentiments: every review and every combination is as frequent
    among negative pairs as among positive ones, so neither tells them apart.

    Args:
        reviews: IMDB's files, and `urls` the folder with `{train,test}/urls_{pos,neg}.txt`: line i names the film of
            review i.
        pairs_per_review: positive pairs each review begins.
    """

    reviews: ReviewFiles
    urls: Path
    seed: int = 0
    pairs_per_review: int = 3

    task: ClassVar[str] = "film-pairs"
    aliases: ClassVar[Mapping[str, str]] = {}

    def describe(self) -> dict[str, Any]:
        urls = files_digest(self.urls, [path for split in ("train", "test") for path in self._films(split)])
        return {
            "task": self.task,
            "source": self.reviews.describe(),
            "urls": urls,
            "seed": self.seed,
            "pairs_per_review": self.pairs_per_review,
        }

    def shards(self) -> dict[str, int]:
        return {split: -(-len(self._reviews(split)) // _PER_SHARD) for split in _FILES}

    def make(self, split: str, number: int) -> Shard:
        """Documents are the reviews, each once; the first shard holds all pairs."""
        rows = self._reviews(split)
        part = rows[number * _PER_SHARD : (number + 1) * _PER_SHARD]
        documents = [read(path) for path, _, _ in part]
        if number:
            return Shard(documents, np.empty((0, 2), np.int32), np.empty(0, np.uint8))
        films = np.unique([film for _, _, film in rows], return_inverse=True)[1]
        sentiments = np.array([label for _, label, _ in rows])
        rng = np.random.default_rng([self.seed, list(_FILES).index(split)])
        pairs, labels = same_or_other(rng, films, sentiments, self.pairs_per_review)
        return Shard(documents, pairs, labels)

    def _reviews(self, split: str) -> list[tuple[Path, int, str]]:
        """Path, sentiment and film. A tenth of the training films is for validation; test films are IMDB's own."""
        folder = "test" if split == "test" else "train"
        films = [read_lines(path) for path in self._films(folder)]
        rows = []
        for path, label in self.reviews.files(folder):
            number, _ = review_number(path)
            if number >= len(films[label]) or not films[label][number].strip():
                raise ValueError(
                    f"{self._films(folder)[label]} has no address for {path.name}: expected in line {number + 1}."
                )
            film = films[label][number]
            held = int(hashlib.sha256(film.encode()).hexdigest(), 16) % 10 == 0
            if split == "test" or held == (split == "dev"):
                rows.append((path, label, film))
        return rows

    def _films(self, folder: str) -> list[Path]:
        """Files with the film of each review, by sentiment."""
        paths = [self.urls / folder / f"urls_{name}.txt" for name in CLASSES]
        for path in paths:
            if not path.is_file():
                raise FileNotFoundError(f"no film addresses: expected {path}, one address per review.")
        return paths


def same_or_other(
    rng: np.random.Generator, films: npt.NDArray[np.int64], sentiments: npt.NDArray[np.int64], per_review: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Pairs of reviews `(n, 2)` with label 1 for one film and 0 for two, shuffled; see `FilmPairs`."""
    first, second = [], []
    for _ in range(per_review):
        a, b = _partners(rng, films)
        first.append(a)
        second.append(b)
    left, right = np.concatenate(first), np.concatenate(second)
    other = _of_other_films(rng, left, right, films, sentiments)
    apart = films[left] != films[other]
    pairs = np.concatenate([np.stack([left, right], 1)[apart], np.stack([left, other], 1)[apart]])
    labels = np.repeat(np.array([1, 0], np.uint8), apart.sum())
    order = rng.permutation(len(labels))
    return pairs[order].astype(np.int32), labels[order]


def _partners(
    rng: np.random.Generator, films: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """For each review another one of its film: the next in a random order of the film's, round in a circle."""
    order = np.lexsort((rng.random(len(films)), films))
    ordered = films[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    sizes = np.diff(starts, append=len(ordered))
    following = np.arange(len(ordered)) + 1
    following[starts + sizes - 1] = starts
    paired = np.repeat(sizes, sizes) > 1
    return order[paired], order[following[paired]]


def _of_other_films(
    rng: np.random.Generator,
    left: npt.NDArray[np.int64],
    right: npt.NDArray[np.int64],
    films: npt.NDArray[np.int64],
    sentiments: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """The second reviews in another order, within each combination of sentiments.

    Pairs are laid out film by film, films in random order, and second reviews move on by the size of the largest film:
    each then meets another film, as long as no film makes up half of the pairs.
    """
    other = right.copy()
    kind = 2 * sentiments[left] + sentiments[right]
    shuffled = rng.permutation(films.max() + 1)[films]
    for which in np.unique(kind):
        group = np.flatnonzero(kind == which)
        group = group[np.lexsort((rng.random(len(group)), shuffled[left[group]]))]
        largest = np.unique(films[left[group]], return_counts=True)[1].max()
        other[group] = np.roll(right[group], largest)
    return other


def _unquoted(text: bytes) -> Tokens:
    """AAN's texts are written as Python byte strings, `b'…'`, in some copies."""
    if text[:2] in (b"b'", b'b"') and text[-1:] == text[1:2]:
        text = text[2:-1]
    return as_bytes(text)
