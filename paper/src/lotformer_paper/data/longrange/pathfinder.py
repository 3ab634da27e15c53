"""Pathfinder: are the two dots the ends of one dashed contour, or of two?

The published stimulus (Linsley et al. 2018) with the arena's parameters: two contours of 14 dashes that start near the
centre, five short distractors, two dots. Every image has the same parts, whatever its label: the dots mark the start of
one contour and the end of the same (1) or of the other one (0).

Where ours differs: directions lie on a lattice of 16, and contours and distractors are equally bright, so that
brightness does not even tell which dashes matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lotformer.data.contents import files_digest
from lotformer.data.images import open_image
from lotformer.reading import read_lines, shown

from .contours import SIDE, draw
from .store import Shard

SIZES: Mapping[str, int] = {"train": 160_000, "dev": 20_000, "test": 20_000}

_PER_SHARD = 2_000


@dataclass(frozen=True)
class Pathfinder:
    """Generated images, as many of one label as of the other in each shard."""

    seed: int = 0
    sizes: Mapping[str, int] = field(default_factory=lambda: dict(SIZES))

    task: ClassVar[str] = "pathfinder"
    aliases: ClassVar[Mapping[str, str]] = {}

    def describe(self) -> dict[str, Any]:
        return {"task": self.task, "source": "generated", **asdict(self)}

    def shards(self) -> dict[str, int]:
        return {split: -(-size // _PER_SHARD) for split, size in self.sizes.items()}

    def make(self, split: str, number: int) -> Shard:
        first = number * _PER_SHARD
        count = min(_PER_SHARD, self.sizes[split] - first)
        rng = np.random.default_rng([self.seed, list(self.sizes).index(split), number])
        labels = rng.permutation(np.arange(count) % 2)
        images = draw(rng, labels)
        return Shard.of_single(list(images.reshape(count, -1)), labels, first)


@dataclass(frozen=True)
class PathfinderFiles:
    """The released images, `<folder>/imgs/*/*.png` with `<folder>/metadata/*.npy`, split 80/10/10 by the seed.

    A folder is one of `curv_baseline`, `curv_contour_length_9` and `curv_contour_length_14` (the arena's).
    """

    folder: Path
    seed: int = 0

    task: ClassVar[str] = "pathfinder-released"
    aliases: ClassVar[Mapping[str, str]] = {}

    def describe(self) -> dict[str, Any]:
        images = [path for path, _ in self._rows()]
        contents = files_digest(self.folder, {*self._tables(), *images})
        return {"task": self.task, "source": "png", "seed": self.seed, "images": len(images), "contents": contents}

    def shards(self) -> dict[str, int]:
        return {split: -(-len(part) // _PER_SHARD) for split, part in self._parts().items()}

    def make(self, split: str, number: int) -> Shard:
        first = number * _PER_SHARD
        images, labels = [], []
        for path, label in self._parts()[split][first : first + _PER_SHARD]:
            pixels = np.asarray(open_image(path, "L"))
            if pixels.shape != (SIDE, SIDE):
                raise ValueError(f"{path}: expected {SIDE}×{SIDE} pixels, got {pixels.shape[1]}×{pixels.shape[0]}.")
            images.append(pixels.reshape(-1))
            labels.append(label)
        return Shard.of_single(images, labels, first)

    def _parts(self) -> dict[str, list[tuple[Path, int]]]:
        rows = self._rows()
        order = np.random.default_rng(self.seed).permutation(len(rows))
        cuts = (0, len(rows) * 8 // 10, len(rows) * 9 // 10, len(rows))
        return {
            split: [rows[i] for i in order[start:end]]
            for split, start, end in zip(SIZES, cuts[:-1], cuts[1:], strict=True)
        }

    def _rows(self) -> list[tuple[Path, int]]:
        """Image and label by the metadata, text files despite their name; empty images of the release are left out."""
        rows = []
        for table in self._tables():
            for number, line in enumerate(read_lines(table), 1):
                columns, where = line.split(), f"{table}, line {number}"
                if len(columns) < 4 or columns[3] not in ("0", "1"):
                    raise ValueError(f"{where}: expected folder, file, number, label …, got {shown(line)}.")
                path = self.folder / columns[0] / columns[1]
                if not path.is_file():
                    raise FileNotFoundError(f"{where} names {path}, which does not exist.")
                if path.stat().st_size:
                    rows.append((path, int(columns[3])))
        return rows

    def _tables(self) -> list[Path]:
        tables = sorted((self.folder / "metadata").glob("*.npy"))
        if not tables:
            raise FileNotFoundError(f"no Pathfinder set: expected {self.folder}/metadata/*.npy and {self.folder}/imgs.")
        return tables
