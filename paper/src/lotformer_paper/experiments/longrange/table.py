"""The paper's Table 2: every mechanism on every task of the arena, at a chosen budget."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lotformer.cli.tables import Table, mean_and_deviation
from lotformer.files import require_writable, write_text
from lotformer.reading import decoding, read_json
from lotformer.settings import Settings, setting
from lotformer.training.logs import Progress

from ...results import figures
from ...results.cells import CellFolder, Listener, Origin, Record
from ...results.report import Report
from ...results.sources import Source
from .rows import MIXED, VARIANTS, row_named
from .settings import LongRangeSettings, Recipe, settings_for

if TYPE_CHECKING:
    from .task import LongRange

NAME = "lra"

COLUMNS = {
    "text": "Text",
    "listops": "ListOps",
    "retrieval": "Retrieval",
    "film-pairs": "Film pairs",
    "pathfinder": "Pathfinder",
    "image": "Image",
}
"""The tasks in the order of the paper's table. Film pairs stand in for Retrieval and are no part of the average."""


@dataclass(frozen=True)
class ArenaSettings(Settings):
    """What is run, and how much is spent on each cell."""

    tasks: tuple[str, ...] = setting(("image",), f"Columns: {', '.join(COLUMNS)}.")
    rows: tuple[str, ...] = setting(
        (
            "lot",
            "lot+dwc",
            "lot-exact",
            "lot-semibalanced",
            "lot-unbalanced",
            "softmax",
            "polaformer",
            "nystromformer",
            "linear-transformer",
            "skyformer",
        ),
        f"Mechanisms; +dwc adds depthwise mixing. Also {', '.join(VARIANTS)}.",
    )
    seeds: tuple[int, ...] = setting((0,), "Runs per cell.", at_least=0)
    steps: int = setting(1000, "Updates per run.", at_least=1)
    batch_size: int | None = setting(None, "Examples per update; the recipe's if not given.", at_least=1)
    recipe: Recipe = setting("paper", "Whose settings to take.")
    evaluations: int = setting(5, "Times that the validation set is looked at on the way, for the figure.", at_least=1)
    evaluated: int | None = setting(None, "Examples that an evaluation looks at; all if not given.", at_least=1)
    searched: Path | None = setting(
        None, "Folder of `experiment lra-search`: a row takes the rate that did best there, not the recipe's."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for task in self.tasks:
            if task not in COLUMNS:
                raise ValueError(f"tasks must be among {', '.join(COLUMNS)}, got {task!r}.")
        for name in self.rows:
            row_named(name)

    def run(self, task: str, name: str, seed: int, rate: float | None = None) -> LongRangeSettings:
        """The settings of one run, at the recipe's learning rate unless another is given."""
        chosen = row_named(name)
        given = {"batch_size": self.batch_size, "lr": rate}
        return settings_for(
            task=task,
            attention=chosen.attention,
            attention_options=chosen.options,
            local_mixing=name.endswith(MIXED),
            pooling=chosen.pooling,
            recipe=self.recipe,
            steps=self.steps,
            seed=seed,
            evaluate_every=max(1, self.steps // self.evaluations),
            evaluated=self.evaluated,
            **{name: value for name, value in given.items() if value is not None},
        )


@dataclass(frozen=True)
class Point:
    """Accuracy on the validation set after so many seconds of training."""

    seconds: float
    step: int
    accuracy: float


@dataclass(frozen=True)
class Cell:
    """One run. `accuracy` is on the test set (a trial's on validation data) with the last weights.

    `residual` is the worst relative deviation of a column sum from its mass in any layer of LOT, on one batch.
    """

    task: str
    row: str
    seed: int
    accuracy: float
    tested: int
    steps: int
    batch_size: int
    seconds: float
    tokens_per_second: float
    attention_share: float | None
    residual: float | None
    curve: tuple[Point, ...]


def run(
    settings: ArenaSettings,
    data: Path,
    out: Path,
    listen: Listener = lambda what, now, total: None,
    command: str = "",
) -> list[Cell]:
    """Fill every cell that is not in `out` yet; returns all of them.

    Raises:
        ValueError: `out` holds cells made from something else.
    """
    from .task import LongRange, prepared_sets  # late: it brings the models and the loop, which rendering does not need

    require_writable(out)
    cells = []
    for task in settings.tasks:
        folder = CellFolder(out / task, Cell, NAME, command)
        first = settings.run(task, settings.rows[0], settings.seeds[0])
        sets = prepared_sets(first, data, partial(listen, f"preparing {task}"))
        source = Source(sets.folder.name, sets.fingerprint)
        rates = _found_rates(settings, task)
        for row in settings.rows:
            for seed in settings.seeds:
                chosen = settings.run(task, row, seed, rates.get(row))
                origin = Origin(chosen.described(), {"data": source})
                name = f"{row}-seed{seed}"
                found = folder.find(name, origin)
                cells.append(found or filled(LongRange(chosen, sets), row, folder, name, origin, listen))
    return cells


def _found_rates(settings: ArenaSettings, task: str) -> dict[str, float]:
    """The searched learning rate of every row; empty if none was searched."""
    if settings.searched is None:
        return {}
    from .search import best_rates

    rates = best_rates(settings.searched, task)
    missing = [row for row in settings.rows if row not in rates]
    if missing:
        raise ValueError(f"no trial of {', '.join(missing)} on {task} in {settings.searched}: search for them first.")
    return rates


def filled(
    task: LongRange,
    row: str,
    folder: CellFolder[Cell],
    name: str,
    origin: Origin,
    listen: Listener,
    split: Literal["dev", "test"] = "test",
) -> Cell:
    """Train, test, store. An interrupted run goes on from its checkpoint, kept beside the cell until it is done."""
    from lotformer.training.run import train

    place = folder.begin(name, origin).with_suffix(".run")
    watch = _Watch(f"{task.settings.task}: {name}", place / "curve.json", listen)
    report = train(task, place, resume=True, listeners=[watch])
    assert task.model is not None
    model = task.model.eval()
    tested = task.count_right(model, split)["accuracy"]
    residuals = task.residuals(model)
    cell = Cell(
        task=task.settings.task,
        row=row,
        seed=task.settings.seed,
        accuracy=tested[0] / tested[1],
        tested=int(tested[1]),
        steps=report.steps,
        batch_size=task.settings.batch_size,
        seconds=watch.seconds,
        tokens_per_second=report.samples_per_second * task.tokens_per_example(),
        attention_share=report.attention,
        residual=max(residuals) if residuals else None,
        curve=tuple(watch.points),
    )
    folder.finish(name, cell, origin, {"steps": report.steps, "minutes": watch.seconds / 60}, task.settings.seed)
    shutil.rmtree(place, ignore_errors=True)
    return cell


class _Watch:
    """Hears of a run: progress for the listener, and accuracy over time, kept in a file for a resumed run."""

    def __init__(self, what: str, path: Path, listen: Listener) -> None:
        self.what, self.path, self.listen = what, path, listen
        self.points: list[Point] = []
        self._before, self._start = 0.0, time.perf_counter()

    @property
    def seconds(self) -> float:
        """Of training and its evaluations, over all runs of the cell."""
        return self._before + time.perf_counter() - self._start

    def started(self, step: int, steps: int) -> None:
        self._start = time.perf_counter()
        if self.path.is_file():
            written = read_json(self.path)
            with decoding(self.path, "a list of accuracies over time"):
                kept = [Point(**point) for point in written]
            self.points = [point for point in kept if point.step <= step]
            self._before = max((point.seconds for point in self.points), default=0.0)

    def stepped(self, progress: Progress) -> None:
        self.listen(self.what, progress.step, progress.steps)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self.points.append(Point(self.seconds, step, metrics["accuracy"]))
        write_text(json.dumps([dataclasses.asdict(point) for point in self.points]), self.path)

    def ended(self) -> None:
        self._before, self._start = self.seconds, time.perf_counter()


def render(folder: Path) -> Report:
    """Table 2 from every cell in the folder, what was spent on them, and accuracy over time."""
    records = _records(folder)
    if not records:
        raise ValueError(f"{folder} holds no finished cell.")
    cells = [record.cell for record in records]
    commands = tuple(dict.fromkeys(record.provenance.command for record in records))
    budgets: dict[str, list[str]] = {}
    for record in records:
        cell, s = record.cell, record.origin.settings
        text = f"{cell.steps} steps of {cell.batch_size} examples, lr {s['lr']:g}, tested on {cell.tested:,} examples"
        budgets.setdefault(f"{COLUMNS[cell.task]}: {text}; {record.provenance.where()}", [])
    notes = (
        "Short budgets: the paper trains for 50,000 steps. Compare within a column, not with the paper.",
        _legend(cells),
        "Accuracy is on the test set, with the weights of the last step: none are chosen by a score. Mean ± standard "
        "deviation over seeds, where there are several. The average leaves out film pairs, which stand in for "
        f"Retrieval, and needs all other columns. {_uncertainty(cells)}",
        "Minutes are of one run, evaluations included; attention's share is of the time of a training step. Column "
        "residual: how far the worst column of LOT's attention matrices is from a sum of one, in the trained model on "
        "one batch; 3e+00 is 300 %. lot-unbalanced imposes no such sum: there it says how uneven the columns are.",
        *(f"{text}." for text in budgets),
    )
    return Report(commands, (_accuracies(cells), _costs(cells)), notes, lambda place: draw(cells, place))


def _uncertainty(cells: Sequence[Cell]) -> str:
    """How far two models of equal worth may lie apart by the choice of test examples alone."""
    by_task = {
        task: max(2.0 * math.sqrt(2 * cell.accuracy * (1 - cell.accuracy) / cell.tested) for cell in found)
        for task in COLUMNS
        if (found := [cell for cell in cells if cell.task == task])
    }
    told = ", ".join(f"{COLUMNS[task]} {100 * points:.1f}" for task, points in by_task.items())
    return f"Differences below so many points may come from the choice of test examples alone: {told}."


def _legend(cells: Sequence[Cell]) -> str:
    """What the rows are that are no mechanism of the registry, and what the figure shows."""
    shown = {cell.row.removesuffix(MIXED) for cell in cells}
    told = [f"{name} is {variant.meaning}" for name, variant in VARIANTS.items() if name in shown]
    if any(cell.row.endswith(MIXED) for cell in cells):
        told.append(f"{MIXED} adds a depthwise convolution of the values")
    figure = "The figure shows validation accuracy over minutes of training, a line for each seed; LOT's are thick."
    return f"{'; '.join(told)}. {figure}" if told else figure


def _records(folder: Path) -> list[Record]:
    found = []
    for task in COLUMNS:
        cells = CellFolder(folder / task, Cell, NAME)
        names = sorted(path.stem for path in (folder / task).glob("*.json"))
        found += [record for name in names if (record := cells.record(name)) is not None]
    return found


def _rows(cells: Sequence[Cell]) -> list[str]:
    """In the order of the settings' default, then by name."""
    order = list(ArenaSettings().rows)
    return sorted({cell.row for cell in cells}, key=lambda row: (order.index(row) if row in order else len(order), row))


def _accuracies(cells: Sequence[Cell]) -> Table:
    tasks = [task for task in COLUMNS if any(cell.task == task for cell in cells)]
    averaged = [task for task in tasks if task != "film-pairs"]
    rows = []
    for row in _rows(cells):
        found = {task: [cell.accuracy for cell in cells if (cell.task, cell.row) == (task, row)] for task in tasks}
        means = [statistics.fmean(found[task]) for task in averaged if found[task]]
        comparable = averaged and len(means) == len(averaged)  # an average over fewer tasks is not
        average = f"{100 * statistics.fmean(means):.1f}" if comparable else "–"
        rows.append((row, *(mean_and_deviation(found[task], 100) for task in tasks), average))
    return Table("Test accuracy, %", ("Attention", *(COLUMNS[task] for task in tasks), "Average"), tuple(rows))


def _costs(cells: Sequence[Cell]) -> Table:
    columns = (
        "Task, attention",
        "seeds",
        "steps",
        "minutes",
        "tokens per\nsecond",
        "attention's\nshare",
        "column\nresidual",
    )
    rows = []
    for task in COLUMNS:
        for row in _rows(cells):
            group = [cell for cell in cells if (cell.task, cell.row) == (task, row)]
            if not group:
                continue
            shares = [cell.attention_share for cell in group if cell.attention_share is not None]
            residuals = [cell.residual for cell in group if cell.residual is not None]
            rows.append(
                (
                    f"{COLUMNS[task]}, {row}",
                    str(len(group)),
                    f"{group[0].steps:,}",
                    f"{statistics.fmean(cell.seconds for cell in group) / 60:.1f}",
                    f"{statistics.fmean(cell.tokens_per_second for cell in group):,.0f}",
                    f"{statistics.fmean(shares):.0%}".replace("%", " %") if shares else "–",
                    f"{max(residuals):.0e}" if residuals else "–",
                )
            )
    return Table("What a run costs, mean over seeds, and how far its columns are off", columns, tuple(rows))


def draw(cells: Sequence[Cell], folder: Path) -> list[Path]:
    """Accuracy on the validation set against minutes of training, a panel per task."""
    plt: Any = figures.pyplot()
    tasks = [task for task in COLUMNS if any(cell.task == task for cell in cells)]
    rows = _rows(cells)
    figure, axes = plt.subplots(1, len(tasks), figsize=(4 * len(tasks) + 1.5, 3.4), squeeze=False, layout="constrained")
    for axis, task in zip(axes[0], tasks, strict=True):
        for cell in (cell for cell in cells if cell.task == task):
            axis.plot(
                [point.seconds / 60 for point in cell.curve],
                [100 * point.accuracy for point in cell.curve],
                color=f"C{rows.index(cell.row) % 10}",
                label=cell.row,
                marker="o",
                markersize=3,
                linewidth=2 if cell.row.startswith("lot") else 1.2,
            )
        axis.set(title=COLUMNS[task], xlabel="minutes of training", ylabel="validation accuracy, %")
        axis.spines[["top", "right"]].set_visible(False)
    handles = {handle.get_label(): handle for axis in axes[0] for handle in axis.get_lines()}
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", frameon=False)
    return figures.save(figure, folder / "accuracy_over_time")
