"""Prepared sets on disk: three memory-mapped arrays per split, and a manifest that is written last.

    <set>/manifest.json                 what the set is, and the SHA-256 of every array
    <set>/<split>/tokens.npy            (total,) uint8: the tokens of all documents, one after another
    <set>/<split>/ends.npy              (documents,) int64: where each document ends in `tokens`
    <set>/<split>/examples.npy          (n, documents per example) int32: the documents of each example
    <set>/<split>/labels.npy            (n,) uint8

A set appears under its name only when it is complete (a renamed folder), so a half-written one is never read.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from lotformer.data.contents import sha256
from lotformer.reading import decoding, read_json

Tokens = npt.NDArray[np.uint8]

MANIFEST = "manifest.json"
_ARRAYS = ("tokens", "ends", "examples", "labels")
_FORMAT = 1


@dataclass(frozen=True)
class Shard:
    """Part of a split: documents, and examples that name documents by their number in the whole split."""

    documents: Sequence[Tokens]
    examples: npt.NDArray[np.int32]
    labels: npt.NDArray[np.uint8]

    @staticmethod
    def of_single(documents: Sequence[Tokens], labels: npt.ArrayLike, first: int) -> Shard:
        """One document per example; the first one is document `first` of the split."""
        numbers = first + np.arange(len(documents), dtype=np.int32)[:, None]
        return Shard(documents, numbers, np.asarray(labels, dtype=np.uint8))

    def save(self, path: Path) -> None:
        """Write the whole file or nothing; two writers of the same shard do not disturb each other."""
        tokens = np.concatenate([*self.documents, np.empty(0, np.uint8)])
        ends = np.cumsum([len(document) for document in self.documents], dtype=np.int64)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".partial", delete=False) as file:
            np.savez(file, tokens=tokens, ends=ends, examples=self.examples, labels=self.labels)
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, path)


@dataclass(frozen=True)
class Example:
    """The documents of one example, and its class."""

    documents: tuple[Tokens, ...]
    label: int


class Split(Dataset[Example]):
    """One split of a prepared set. Arrays are memory-mapped: opening is cheap and processes share the pages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tokens, self._ends, self.examples, self.labels = (
            np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Example:
        documents = tuple(self._document(int(number)) for number in self.examples[index])
        return Example(documents, int(self.labels[index]))

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        """A batch at once, as PyTorch's fetcher asks for it."""
        return [self[index] for index in indices]

    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of the longest document of each example."""
        return self._document_lengths().max(1)

    def tokens_per_example(self) -> npt.NDArray[np.int64]:
        """Tokens of all documents of each example."""
        return self._document_lengths().sum(1)

    def _document_lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self._ends, prepend=np.int64(0))[self.examples]

    def _document(self, number: int) -> Tokens:
        start = self._ends[number - 1] if number else 0
        return self._tokens[start : self._ends[number]]


class PreparedSet:
    """A complete set: its splits by name, what it is, and the fingerprint of its contents."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self.folder = folder
        self.description: dict[str, Any] = manifest["description"]
        self._checksums: dict[str, str] = manifest["checksums"]
        self._aliases: dict[str, str] = manifest["aliases"]

    @property
    def splits(self) -> list[str]:
        stored = {name.split("/")[0] for name in self._checksums}
        return sorted(stored | set(self._aliases))

    @property
    def fingerprint(self) -> str:
        """One hash of all arrays: equal sets have equal fingerprints wherever they were made."""
        return hashlib.sha256(json.dumps(self._checksums, sort_keys=True).encode()).hexdigest()[:16]

    def __getitem__(self, split: str) -> Split:
        stored = self._aliases.get(split, split)
        if f"{stored}/labels.npy" not in self._checksums:
            raise KeyError(f"{self.folder} has no split {split!r}: it has {', '.join(self.splits)}.")
        return Split(self.folder / stored)

    def verify(self) -> None:
        """Read every array once and compare it with its checksum.

        Raises:
            ValueError: an array is missing or damaged, by name.
        """
        for name, expected in self._checksums.items():
            path = self.folder / name
            if not path.is_file():
                raise ValueError(f"{path} is missing: delete {self.folder} and prepare the set again.")
            if sha256(path) != expected:
                raise ValueError(f"{path} is damaged (checksum differs): delete {self.folder} and prepare it again.")


def open_set(folder: Path, *, verify: bool = True) -> PreparedSet:
    """A prepared set, its checksums verified.

    Raises:
        FileNotFoundError: there is none. ValueError: it is damaged, or of another version.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is not a prepared set: run `lotformer data prepare` first.")
    try:
        manifest = read_json(path)
        found = manifest["format"]
        prepared = PreparedSet(folder, manifest)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): delete {folder} and prepare the set again.") from error
    if found != _FORMAT:
        raise ValueError(f"{folder} has format {found}, expected {_FORMAT}: delete it and prepare the set again.")
    if verify:
        prepared.verify()
    return prepared


def publish(
    target: Path, splits: Mapping[str, Iterable[Path]], aliases: Mapping[str, str], description: Mapping[str, Any]
) -> None:
    """Join the shards of every split and let the set appear under its name, all at once.

    Where another process has published the same set meanwhile, that one stays: they are equal.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        building.chmod(0o777 & ~_umask())
        for split, shards in splits.items():
            _join(building / split, list(shards))
        names = [f"{split}/{name}.npy" for split in splits for name in _ARRAYS]
        manifest = {
            "format": _FORMAT,
            "description": dict(description),
            "aliases": dict(aliases),
            "checksums": {name: sha256(building / name) for name in names},
        }
        (building / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        try:
            building.rename(target)
        except OSError:
            if not (target / MANIFEST).is_file():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _join(folder: Path, shards: Sequence[Path]) -> None:
    """One array after another, so that no more than one kind is in memory."""
    folder.mkdir()
    for name in _ARRAYS:
        parts, offset = [], 0
        for path in shards:
            with decoding(path, "a shard (delete it and prepare the set again)"), np.load(path) as shard:
                part = shard[name]
            if name == "ends":
                part = part + offset
                offset = int(part[-1]) if len(part) else offset
            parts.append(part)
        np.save(folder / f"{name}.npy", np.concatenate(parts))


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
