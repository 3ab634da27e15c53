"""Finished cells of an experiment: JSON files that say what was measured, from what, with which settings and where.

A run skips the cells it finds, so an interrupted one goes on where it stopped. A cell made with other settings, or from
other files, is never taken for one of this run: that is an error which says what differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from .plain import read, reading, restore, write
from .provenance import Provenance, provenance
from .sources import Source

Cell = TypeVar("Cell")


@dataclass(frozen=True)
class Origin:
    """The origin of a cell: settings by name, and files by content."""

    settings: dict[str, Any]
    sources: dict[str, Source]

    def without(self, *beginnings: str) -> Origin:
        """The origin without the settings whose names begin so, for cells made before these matter."""
        return Origin({n: value for n, value in self.settings.items() if not n.startswith(beginnings)}, self.sources)


@dataclass(frozen=True)
class Record:
    """A cell as it is stored, with the name of the experiment that made it."""

    experiment: str
    cell: Any
    origin: Origin
    provenance: Provenance


@dataclass(frozen=True)
class _Begun:
    origin: Origin


@dataclass(frozen=True)
class CellFolder(Generic[Cell]):
    """The cells of an experiment in a folder. `kind` is their class or a union of
    several, `command` what to type to make them again.
    """

    folder: Path
    kind: Any
    experiment: str
    command: str = field(default="")

    def find(self, name: str, origin: Origin) -> Cell | None:
        """The finished cell, or None.

        Raises:
            ValueError: the cell was finished, or begun, from something else.
        """
        if self._begun(name).is_file():
            _require_same(self._begun(name), origin, read(_Begun, self._begun(name)).origin)
        record = self.record(name)
        if record is None:
            return None
        _require_same(self._finished(name), origin, record.origin)
        return record.cell

    def begin(self, name: str, origin: Origin, part: str = "training") -> Path:
        """Note from what the cell is begun; returns where this part of it may keep a checkpoint."""
        write(_Begun(origin), self._begun(name))
        return self.folder / f"{name}.{part}.checkpoint"

    def finish(self, name: str, cell: Cell, origin: Origin, budget: Mapping[str, Any], seed: int) -> Cell:
        """Store the cell and drop what `begin` has left."""
        source = provenance(self.command, threads=torch.get_num_threads(), seed=seed, budget=budget)
        write(Record(self.experiment, cell, origin, source), self._finished(name))
        self._begun(name).unlink(missing_ok=True)
        for left in (*self.folder.glob(f"{name}.*checkpoint"), *self.folder.glob(f"{name}.*partial")):
            left.unlink()
        return cell

    def record(self, name: str) -> Record | None:
        """Everything stored with a finished cell, or None."""
        path = self._finished(name)
        if not path.is_file():
            return None
        found = record_of(self.kind, path)
        if found.experiment != self.experiment:
            raise ValueError(f"{path} is a cell of the experiment {found.experiment!r}: choose another --out.")
        return found

    def _finished(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _begun(self, name: str) -> Path:
        return self.folder / f"{name}.begun"


def record_of(kind: Any, path: Path) -> Record:
    """The cell in a file with everything that is stored with it; `kind` is its class, or a union of several.

    Raises:
        ValueError: the file holds something else.
    """
    found = read(Record, path)
    with reading(path):
        return replace(found, cell=restore(kind, found.cell))


def _require_same(path: Path, wanted: Origin, found: Origin) -> None:
    different = [
        f"{name} {found.settings.get(name, 'not recorded')} instead of {value}"
        for name, value in wanted.settings.items()
        if name not in found.settings or found.settings[name] != value
    ]
    for name, source in wanted.sources.items():
        other = found.sources.get(name)
        if other is None:
            different.append(f"the contents of its {name} were not recorded")
        elif other.sha256 != source.sha256:
            different.append(
                f"{name} with other contents: {other.name} (sha256 {other.sha256[:12]}) "
                f"instead of {source.name} ({source.sha256[:12]})"
            )
    if different:
        raise ValueError(
            f"{path.parent} holds cells made from something else ({path.name}: {'; '.join(different)}). "
            "Choose another --out, or give what those cells were made from."
        )
