"""The learning rate of every row of the arena's table, found alike: the same trials for all, on validation data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from lotformer.cli.tables import Table
from lotformer.files import require_writable
from lotformer.settings import setting

from ...results.cells import CellFolder, Listener, Origin, Record
from ...results.report import Report
from ...results.sources import Source
from .table import COLUMNS, ArenaSettings, Cell, filled

NAME = "lra-search"


@dataclasses.dataclass(frozen=True)
class SearchSettings(ArenaSettings):
    """What is tried for each row, and how long."""

    rates: tuple[float, ...] = setting((5e-4, 1e-3, 2e-3, 4e-3), "Peak learning rates; one trial each.", at_least=0)


def run(
    settings: SearchSettings,
    data: Path,
    out: Path,
    listen: Listener = lambda what, now, total: None,
    command: str = "",
) -> list[Cell]:
    """Run every trial that is not in `out` yet; returns all of them. The test set is not looked at."""
    from .task import LongRange, prepared_sets  # late: it brings the models and the loop

    require_writable(out)
    cells = []
    for task in settings.tasks:
        folder = CellFolder(out / task, Cell, NAME, command)
        first = settings.run(task, settings.rows[0], settings.seeds[0])
        sets = prepared_sets(first, data, partial(listen, f"preparing {task}"))
        source = Source(sets.folder.name, sets.fingerprint)
        trials = [(row, rate, seed) for row in settings.rows for rate in settings.rates for seed in settings.seeds]
        for row, rate, seed in trials:
            chosen = settings.run(task, row, seed, rate)
            origin, name = Origin(chosen.described(), {"data": source}), f"{row}-lr{rate:g}-seed{seed}"
            found = folder.find(name, origin)
            cells.append(found or filled(LongRange(chosen, sets), row, folder, name, origin, listen, split="dev"))
    return cells


def best_rates(folder: Path, task: str) -> dict[str, float]:
    """The learning rate of each row at which its mean validation accuracy ended highest.

    Raises:
        FileNotFoundError: the folder holds no trial of the task.
    """
    accuracies = _accuracies(_records(folder, task))
    if not accuracies:
        raise FileNotFoundError(f"{folder} holds no trial of {task}: run `lotformer experiment {NAME}` first.")
    return {row: max(found, key=lambda rate: found[rate]) for row, found in accuracies.items()}


def render(folder: Path) -> Report:
    """Validation accuracy of every trial; the best of a row in bold."""
    tables, commands, notes = [], [], []
    for task, title in COLUMNS.items():
        records = _records(folder, task)
        if not records:
            continue
        commands += [record.provenance.command for record in records]
        accuracies = _accuracies(records)
        rates = sorted({rate for found in accuracies.values() for rate in found})
        rows = []
        for row, found in accuracies.items():
            best = max(found.values())
            texts = [f"{100 * found[rate]:.1f}" if rate in found else "–" for rate in rates]
            bold = [f"**{text}**" if found.get(rate) == best else text for rate, text in zip(rates, texts, strict=True)]
            rows.append((row, *bold))
        tables.append(Table(f"{title}: validation accuracy, %, by peak learning rate",
                            ("Attention", *(f"{rate:g}" for rate in rates)), tuple(rows)))  # fmt: skip
        cell = records[0].cell
        notes.append(
            f"{title}: {cell.steps:,} steps of {cell.batch_size} examples, judged on {cell.tested:,} validation "
            f"examples; {records[0].provenance.where()}."
        )
    if not tables:
        raise ValueError(f"{folder} holds no finished trial.")
    return Report(tuple(dict.fromkeys(commands)), tuple(tables), tuple(notes))


def _records(folder: Path, task: str) -> list[Record]:
    cells = CellFolder(folder / task, Cell, NAME)
    found = [cells.record(path.stem) for path in sorted((folder / task).glob("*.json"))]
    return [record for record in found if record is not None]


def _accuracies(records: list[Record]) -> Mapping[str, dict[float, float]]:
    """Mean accuracy over seeds, by row and rate."""
    gathered: dict[str, dict[float, list[float]]] = {}
    for record in records:
        rates = gathered.setdefault(record.cell.row, {})
        rates.setdefault(record.origin.settings["lr"], []).append(record.cell.accuracy)
    return {row: {rate: sum(x) / len(x) for rate, x in rates.items()} for row, rates in gathered.items()}
