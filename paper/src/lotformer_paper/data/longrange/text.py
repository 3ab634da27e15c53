"""Text: is a film review favourable? IMDB as bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lotformer.data.contents import files_digest
from lotformer.data.saved import saved_dataset, saved_files
from lotformer.reading import require_file

from .store import Shard, Tokens

CLASSES = ("neg", "pos")
MAX_BYTES = 4_000
_PER_SHARD = 2_500


def as_bytes(text: bytes, longest: int = MAX_BYTES) -> Tokens:
    """Tokens of a document: its first bytes. Byte 0 means padding; a text that has one gets a space instead."""
    return np.frombuffer(text[:longest].replace(b"\0", b" "), dtype=np.uint8)


@dataclass(frozen=True)
class ReviewFiles:
    """A folder in IMDB's own layout: `{train,test}/{pos,neg}/*.txt`. The arena validates on the test set, so do we."""

    folder: Path

    task: ClassVar[str] = "text"
    aliases: ClassVar[Mapping[str, str]] = {"dev": "test"}

    def describe(self) -> dict[str, Any]:
        paths = [path for split in ("train", "test") for path, _ in self.files(split)]
        contents = files_digest(self.folder, paths)
        return {"task": self.task, "source": "files", "bytes": MAX_BYTES, "files": len(paths), "contents": contents}

    def shards(self) -> dict[str, int]:
        return {split: -(-len(self.files(split)) // _PER_SHARD) for split in ("train", "test")}

    def make(self, split: str, number: int) -> Shard:
        first = number * _PER_SHARD
        files = self.files(split)[first : first + _PER_SHARD]
        return Shard.of_single([read(path) for path, _ in files], [label for _, label in files], first)

    def files(self, split: str) -> list[tuple[Path, int]]:
        """Reviews with their labels, negative ones first, by number."""
        found = []
        for label, name in enumerate(CLASSES):
            place = self.folder / split / name
            if not place.is_dir():
                raise FileNotFoundError(f"no reviews: expected {place}/*.txt, as in the unpacked aclImdb archive.")
            found += [(path, label) for path in sorted(place.glob("*.txt"), key=review_number)]
        return found


@dataclass(frozen=True)
class ReviewDataset:
    """IMDB as a Hugging Face data set saved to disk, with columns `text` and `label`."""

    folder: Path

    task: ClassVar[str] = "text"
    aliases: ClassVar[Mapping[str, str]] = {"dev": "test"}

    def describe(self) -> dict[str, Any]:
        contents = files_digest(self.folder, saved_files(self.folder))
        return {"task": self.task, "source": "datasets", "bytes": MAX_BYTES, "contents": contents}

    def shards(self) -> dict[str, int]:
        return {split: -(-len(self._rows(split)) // _PER_SHARD) for split in ("train", "test")}

    def make(self, split: str, number: int) -> Shard:
        first = number * _PER_SHARD
        rows: Mapping[str, Sequence[Any]] = self._rows(split)[first : first + _PER_SHARD]
        return Shard.of_single([as_bytes(text.encode()) for text in rows["text"]], rows["label"], first)

    def _rows(self, split: str) -> Any:
        return saved_dataset(self.folder)[split]


def review_number(path: Path) -> tuple[int, str]:
    """IMDB's names are `<number>_<rating>.txt`; other names sort after them."""
    number = path.stem.split("_")[0]
    return (int(number) if number.isdigit() else 10**9, path.name)


def read(path: Path) -> Tokens:
    require_file(path)
    with path.open("rb") as file:
        return as_bytes(file.read(MAX_BYTES))


def reviews(folder: Path) -> ReviewFiles | ReviewDataset:
    """IMDB in a data folder: `aclImdb/` or the saved data set `imdb/`."""
    if (folder / "imdb" / "dataset_dict.json").is_file():
        return ReviewDataset(folder / "imdb")
    if (folder / "aclImdb").is_dir():
        return ReviewFiles(folder / "aclImdb")
    raise FileNotFoundError(
        f"no IMDB reviews: expected {folder}/aclImdb (the archive unpacked) or {folder}/imdb (saved)."
    )
