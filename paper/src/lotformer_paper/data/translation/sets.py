"""Prepared sets of sentence pairs: read, cleaned, with their vocabulary, made once.

    <set>/manifest.json                     what the set is, and the SHA-256 of every file
    <set>/{train,valid,test}.{source,target}   one sentence per line
    <set>/tokenizer.json                    the vocabulary

A set appears under its name only when it is complete. Sentences are kept as text: tokens are cheap to make from them,
and a checkpoint with a vocabulary of its own can use the set too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from lotformer.files import new_folder
from lotformer.reading import read_json

from . import vocabulary
from .cleaning import Cleaning
from .corpora import READERS, SPLITS, Corpus, Reader, files, read_corpus
from .lines import Pair, read_pairs

_FORMAT = 1
_MANIFEST, _TOKENIZER = "manifest.json", "tokenizer.json"
_SIDES = ("source", "target")


@dataclass(frozen=True)
class Recipe:
    """The description of a set.

    Attributes:
        corpora: names among `corpora.READERS`, or "files" with three prefixes of aligned files; the first one's
            validation and test sets count. source, target: languages, as files are named after them.
        vocabulary: tokens of the joint BPE.
    """

    corpora: tuple[str, ...] = ("multi30k",)
    source: str = "de"
    target: str = "en"
    cleaning: Cleaning = field(default_factory=Cleaning)
    vocabulary: int = 10_000
    prefixes: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        for name in self.corpora:
            if name not in (*READERS, "files"):
                raise ValueError(f"unknown corpus {name!r}: known are {', '.join((*READERS, 'files'))}.")
        if not self.corpora:
            raise ValueError("expected at least one corpus.")
        if "files" in self.corpora and len(self.prefixes) != len(SPLITS):
            raise ValueError(f"files need three prefixes, for {', '.join(SPLITS)}; got {len(self.prefixes)}.")
        if self.source == self.target:
            raise ValueError(f"source and target are both {self.source!r}: expected two languages.")

    def readers(self) -> list[Reader]:
        return [files(*self.prefixes) if name == "files" else READERS[name] for name in self.corpora]


class TranslationSet:
    """A prepared set: pairs by split, and the vocabulary."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self.folder = folder
        self.description: dict[str, Any] = manifest["description"]
        self._checksums: dict[str, str] = manifest["checksums"]
        self._splits: dict[str, list[Pair]] = {}

    @property
    def fingerprint(self) -> str:
        """Equal sets have equal fingerprints wherever they were made."""
        return hashlib.sha256(json.dumps(self._checksums, sort_keys=True).encode()).hexdigest()[:16]

    @cached_property
    def tokenizer(self) -> Any:
        """The vocabulary as a tokenizer of transformers."""
        from tokenizers import Tokenizer

        return vocabulary.as_transformers(Tokenizer.from_file(str(self.folder / _TOKENIZER)))

    def __getitem__(self, split: str) -> list[Pair]:
        if split not in SPLITS:
            raise KeyError(f"no split {split!r}: there are {', '.join(SPLITS)}.")
        if split not in self._splits:
            source, target = (self.folder / f"{split}.{side}" for side in _SIDES)
            self._splits[split] = read_pairs(source, target)
        return self._splits[split]

    def verify(self) -> None:
        """Compare every file with its checksum.

        Raises:
            ValueError: a file is missing or damaged, by name.
        """
        for name, expected in self._checksums.items():
            path = self.folder / name
            if not path.is_file() or _sha256(path) != expected:
                raise ValueError(f"{path} is missing or damaged: delete {self.folder} and prepare the set again.")


def prepare(recipe: Recipe, data: Path) -> TranslationSet:
    """The set of a recipe, in the folder `translation` of the data folder; made now unless it is there.

    Only training pairs are cleaned: what is scored stays as it is, but for its case and spaces. The folder's name
    carries a hash of the recipe and of the texts, so other files make another set.
    """
    corpus = read_corpus(recipe.readers(), data, recipe.source, recipe.target)
    description = _description(recipe, corpus)
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:12]
    name = f"{'+'.join(recipe.corpora)}-{recipe.source}-{recipe.target}-{digest}"
    target = data / "translation" / name
    if (target / _MANIFEST).is_file():
        return open_set(target)
    cleaning = recipe.cleaning
    splits = {
        "train": cleaning.kept(corpus.train),
        "valid": [cleaning.pair(pair) for pair in corpus.valid],
        "test": [cleaning.pair(pair) for pair in corpus.test],
    }
    if not splits["train"]:
        raise ValueError(f"no training pair is left of {len(corpus.train)} after cleaning: loosen the limits.")
    tokenizer = vocabulary.learn((text for pair in splits["train"] for text in pair), recipe.vocabulary)
    with new_folder(target) as draft:
        for split, pairs in splits.items():
            for index, side in enumerate(_SIDES):
                text = "".join(f"{pair[index]}\n" for pair in pairs)
                (draft / f"{split}.{side}").write_bytes(text.encode())
        tokenizer.save(str(draft / _TOKENIZER))
        checksums = {path.name: _sha256(path) for path in sorted(draft.iterdir())}
        manifest = {"format": _FORMAT, "description": description, "checksums": checksums}
        (draft / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return open_set(target)


def open_set(folder: Path) -> TranslationSet:
    """A prepared set, its checksums verified.

    Raises:
        FileNotFoundError: there is none. ValueError: it is damaged, or of another version.
    """
    path = folder / _MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is not a prepared set: run `lotformer data prepare translation` first.")
    try:
        manifest = read_json(path)
        found = manifest["format"]
        made = TranslationSet(folder, manifest)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): delete {folder} and prepare the set again.") from error
    if found != _FORMAT:
        raise ValueError(f"{folder} has format {found}, expected {_FORMAT}: delete it and prepare the set again.")
    made.verify()
    return made


def _description(recipe: Recipe, corpus: Corpus) -> dict[str, Any]:
    """Plain data that determine the set; texts stand for the files, wherever those are."""
    texts = {split: _digest(getattr(corpus, split)) for split in SPLITS}
    return {
        "corpora": list(recipe.corpora),
        "source": recipe.source,
        "target": recipe.target,
        "vocabulary": recipe.vocabulary,
        "texts": texts,
        **asdict(recipe.cleaning),
    }


def _digest(pairs: Sequence[Pair]) -> str:
    digest = hashlib.sha256()
    for pair in pairs:
        digest.update("\0".join(pair).encode() + b"\n")
    return digest.hexdigest()[:16]


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
