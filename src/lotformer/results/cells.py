"""Finished cells of an experiment: JSON files that say what was measured, with which settings, where and how long.

A run skips the cells it finds, so an interrupted one goes on where it stopped. A cell made with other settings is never
taken for one of this run: that is an error.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from .provenance import Provenance, provenance, write_json

Listener = Callable[[str, int, int], None]
"""Called with what is being done, how far it is, and how far it will go."""

Cell = TypeVar("Cell")


@dataclass(frozen=True)
class Record:
    """A cell as it is stored. `budget` is what was spent on it, e.g. the steps that were really taken."""

    cell: Any
    settings: dict[str, Any]
    budget: dict[str, Any]
    provenance: Provenance
    transformers: str


class CellFolder(Generic[Cell]):
    """The cells in a folder. `restore` makes one of plain data, `command` is what to type to make them again.

    `formerly` says what settings were before they could be chosen: cells of earlier versions do not name them.
    """

    def __init__(
        self,
        folder: Path,
        restore: Callable[[dict[str, Any]], Cell],
        command: str,
        formerly: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder, self.restore, self.command = folder, restore, command
        self.formerly = dict(formerly or {})

    def find(self, name: str, settings: Mapping[str, Any]) -> Cell | None:
        """The finished cell, or None.

        Raises:
            ValueError: the cell was finished, or begun, with other settings.
        """
        for path in (self._begun(name), self._finished(name)):
            if path.is_file():
                _require_same(path, settings, {**self.formerly, **read(path)["settings"]})
        path = self._finished(name)
        return self.restore(read(path)["cell"]) if path.is_file() else None

    def begin(self, name: str, settings: Mapping[str, Any], part: str = "training") -> Path:
        """Note with which settings the cell is begun; returns where this part of it may keep a checkpoint."""
        write_json(_Begun(dict(settings)), self._begun(name))
        return self.folder / f"{name}.{part}.checkpoint"

    def finish(self, name: str, cell: Cell, settings: Mapping[str, Any], budget: Mapping[str, Any], seed: int) -> Cell:
        """Store the cell and drop what `begin` has left."""
        source = provenance(self.command, threads=torch.get_num_threads(), seed=seed)
        record = Record(cell, dict(settings), dict(budget), source, metadata.version("transformers"))
        write_json(record, self._finished(name))
        self._begun(name).unlink(missing_ok=True)
        for left in (*self.folder.glob(f"{name}.*checkpoint"), *self.folder.glob(f"{name}.*partial")):
            left.unlink()
        return cell

    def record(self, name: str) -> dict[str, Any] | None:
        """Everything stored with a finished cell, or None. Early cells hold less than a `Record`."""
        path = self._finished(name)
        return read(path) if path.is_file() else None

    def _finished(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _begun(self, name: str) -> Path:
        return self.folder / f"{name}.begun"


@dataclass(frozen=True)
class _Begun:
    settings: dict[str, Any]


def stamp(settings: Any, checkpoint: str | Path) -> dict[str, Any]:
    """Settings as plain data, with the checkpoint they apply to by the end of its path."""
    return {**dataclasses.asdict(settings), "checkpoint": "/".join(Path(checkpoint).parts[-2:])}


def read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        record["settings"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a cell of this experiment ({error}): delete it or choose another --out."
        ) from error
    return record


def machine(record: Mapping[str, Any]) -> str:
    """Where a cell was made, in one line."""
    source = record.get("provenance")
    if source is None:
        return f"machine not recorded; torch {record.get('torch', 'unknown')}"
    return (
        f"{source['cpu']}, {source['cores']} cores, {source['threads']} threads; torch {source['torch']}, "
        f"transformers {record['transformers']}, lotformer {source['lotformer']}"
    )


def _require_same(path: Path, wanted: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    # the first version did not name the checkpoint
    different = [name for name in wanted if name in found and found[name] != wanted[name]]
    if different:
        told = ", ".join(f"{name} {found[name]} instead of {wanted[name]}" for name in different)
        raise ValueError(
            f"{path.parent} holds cells of other settings ({path.name}: {told}). "
            "Choose another --out, or give the settings of the cells that are there."
        )
