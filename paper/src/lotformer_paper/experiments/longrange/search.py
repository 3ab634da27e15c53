"""The learning rate of every row of the arena's table, found alike: the same trials for all, on validation data."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

from lotformer.cli.tables import Table
from lotformer.cli.terminal import Listener
from lotformer.settings import setting

from ...results.cells import Record
from ..engine import Experiment, Job, alike, records
from ..inputs import ArenaData
from .table import COLUMNS, ArenaSettings, Cell, in_columns, job, prepared_tasks


@dataclasses.dataclass(frozen=True)
class SearchSettings(ArenaSettings):
    """Trials of each row, and their length."""

    rates: tuple[float, ...] = setting((5e-4, 1e-3, 2e-3, 4e-3), "Peak learning rates; one trial each.", at_least=0)


def plan(settings: SearchSettings, listen: Listener, data_dir: ArenaData = None) -> Iterator[Job]:
    """A job for every trial. The test set is not looked at."""
    for task, sets, source in prepared_tasks(settings, listen, data_dir):
        for row, rate, seed in itertools.product(settings.rows, settings.rates, settings.seeds):
            chosen = settings.run(task, row, seed, rate)
            yield job(f"{task}/{row}-lr{rate:g}-seed{seed}", row, chosen, sets, source, listen, split="dev")


def best_rates(folder: Path, task: str) -> dict[str, float]:
    """The learning rate of each row at which its mean validation accuracy ended highest.

    Raises:
        FileNotFoundError: the folder holds no trial of the task.
    """
    accuracies = _accuracies([record for record in records(EXPERIMENT, folder) if record.cell.task == task])
    if not accuracies:
        raise FileNotFoundError(f"{folder} holds no trial of {task}: run `lotformer experiment lra-search` first.")
    return {row: max(found, key=lambda rate: found[rate]) for row, found in accuracies.items()}


def _by_task(records: list[Record]) -> dict[str, list[Record]]:
    return alike(records, lambda record: str(record.cell.task))


def _tables(records: list[Record]) -> list[Table]:
    """Validation accuracy of every trial; the best of a row in bold."""
    tables = []
    for task, trials in _by_task(records).items():
        accuracies = _accuracies(trials)
        rates = sorted({rate for found in accuracies.values() for rate in found})
        rows = []
        for row, found in accuracies.items():
            best = max(found.values())
            texts = [f"{100 * found[rate]:.1f}" if rate in found else "–" for rate in rates]
            bold = [f"**{text}**" if found.get(rate) == best else text for rate, text in zip(rates, texts, strict=True)]
            rows.append((row, *bold))
        tables.append(Table(f"{COLUMNS[task]}: validation accuracy, %, by peak learning rate",
                            ("Attention", *(f"{rate:g}" for rate in rates)), tuple(rows)))  # fmt: skip
    return tables


def _notes(records: list[Record]) -> list[str]:
    return [
        f"{COLUMNS[task]}: {first.cell.steps:,} steps of {first.cell.batch_size} examples, judged on "
        f"{first.cell.tested:,} validation examples; {first.provenance.where()}."
        for task, (first, *_) in _by_task(records).items()
    ]


def _accuracies(records: list[Record]) -> Mapping[str, dict[float, float]]:
    """Mean accuracy over seeds, by row and rate."""
    gathered: dict[str, dict[float, list[float]]] = {}
    for record in records:
        rates = gathered.setdefault(record.cell.row, {})
        rates.setdefault(record.origin.settings["lr"], []).append(record.cell.accuracy)
    return {row: {rate: sum(x) / len(x) for rate, x in rates.items()} for row, rates in gathered.items()}


EXPERIMENT = Experiment(
    name="lra-search",
    about="The learning rate of every row of Table 2, found on validation data by the same trials for all.",
    settings=SearchSettings,
    cell=Cell,
    plan=plan,
    arranged=in_columns,
    tables=_tables,
    notes=_notes,
    extras=("train",),
)
