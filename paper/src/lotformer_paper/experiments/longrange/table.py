"""The paper's Table 2: every mechanism on every task of the arena, at a chosen budget."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lotformer.cli.tables import Table, mean_and_deviation
from lotformer.cli.terminal import Listener
from lotformer.data.folder import data_folder
from lotformer.files import write_text
from lotformer.reading import decoding, read_json
from lotformer.settings import Settings, setting
from lotformer.training.logs import Progress

from ...data.longrange.store import PreparedSet
from ...results import figures
from ...results.cells import Origin, Record
from ...results.paper import TABLE_2
from ...results.report import largest
from ...results.sources import Source
from ..engine import Cells, Experiment, Job, alike
from ..inputs import ARENA, ArenaData
from .rows import ALL, MIXED, PAPERS_TASKS, VARIANTS, as_printed, row_named
from .settings import LongRangeSettings, Recipe, settings_for

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
    """Rows, tasks, and the budget of each cell."""

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
        f"Mechanisms; +dwc adds depthwise mixing. Also {', '.join(VARIANTS)}; and {ALL} for all {len(TABLE_2)} of the "
        "paper's table.",
    )
    seeds: tuple[int, ...] = setting((0,), "Runs per cell.", at_least=0)
    steps: int = setting(1000, "Updates per run.", at_least=1)
    batch_size: int | None = setting(None, "Examples per update; the recipe's if not given.", at_least=1)
    recipe: Recipe = setting("paper", "Whose settings: the paper's text, Skyformer's protocol or the authors' code.")
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
        every = {name: None for row in self.rows for name in (TABLE_2 if row == ALL else [row])}
        object.__setattr__(self, "rows", tuple(every))
        for name in self.rows:
            row_named(name)

    def run(self, task: str, name: str, seed: int, rate: float | None = None) -> LongRangeSettings:
        """The settings of one run, at the recipe's learning rate unless another is given."""
        chosen = row_named(name)
        pooling = None if chosen.pooling == "real" else chosen.pooling  # the recipe's
        given = {"batch_size": self.batch_size, "lr": rate, "pooling": pooling}
        return settings_for(
            task=task,
            attention=chosen.attention,
            attention_options=chosen.options,
            local_mixing=name.endswith(MIXED),
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


def plan(settings: ArenaSettings, listen: Listener, data_dir: ArenaData = None) -> Iterator[Job]:
    """A job for every cell: tasks × rows × seeds."""
    for task, sets, source in prepared_tasks(settings, listen, data_dir):
        rates = _found_rates(settings, task)
        for row in settings.rows:
            for seed in settings.seeds:
                chosen = settings.run(task, row, seed, rates.get(row))
                yield job(f"{task}/{row}-seed{seed}", row, chosen, sets, source, listen)


def prepared_tasks(
    settings: ArenaSettings, listen: Listener, data_dir: Path | None
) -> Iterator[tuple[str, PreparedSet, Source]]:
    """The tasks with their sets, prepared now unless they are there."""
    from .task import prepared_sets  # late: it brings the models and the loop, which rendering does not need

    folder = data_folder(data_dir, ARENA)
    for task in settings.tasks:
        first = settings.run(task, settings.rows[0], settings.seeds[0])
        sets = prepared_sets(first, folder, partial(listen, f"preparing {task}"))
        yield task, sets, Source(sets.folder.name, sets.fingerprint)


def job(
    name: str,
    row: str,
    settings: LongRangeSettings,
    sets: PreparedSet,
    source: Source,
    listen: Listener,
    split: Literal["dev", "test"] = "test",
) -> Job:
    """Train, test on a split, store. An interrupted run goes on from its checkpoint, kept beside the cell."""

    def make(cells: Cells) -> None:
        from lotformer.training.run import train

        from .task import LongRange

        task = LongRange(settings, sets)
        place = cells.begin(name).with_suffix(".run")
        watch = _Watch(f"{settings.task}: {Path(name).name}", place / "curve.json", listen)
        report = train(task, place, resume=True, listeners=[watch])
        assert task.model is not None
        model = task.model.eval()
        tested = task.count_right(model, split)["accuracy"]
        cell = Cell(
            task=settings.task,
            row=row,
            seed=settings.seed,
            accuracy=tested[0] / tested[1],
            tested=int(tested[1]),
            steps=report.steps,
            batch_size=settings.batch_size,
            seconds=watch.seconds,
            tokens_per_second=report.samples_per_second * task.tokens_per_example(),
            attention_share=report.attention,
            residual=max(task.residuals(model), default=None),
            curve=tuple(watch.points),
        )
        cells.finish(name, cell, {"steps": report.steps, "minutes": watch.seconds / 60})
        shutil.rmtree(place, ignore_errors=True)

    return Job({name: Origin(settings.described(), {"data": source})}, make, settings.seed)


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


def in_columns(records: list[Record]) -> list[Record]:
    """In the order of the table's columns."""
    return sorted(records, key=lambda record: list(COLUMNS).index(record.cell.task))


def _tables(records: list[Record]) -> list[Table]:
    cells = [record.cell for record in records]
    return [_accuracies(cells), *as_printed(_rows(cells), _shown(cells)), _costs(cells)]


def _notes(records: list[Record]) -> list[str]:
    cells = [record.cell for record in records]
    return [
        "Short budgets: the paper trains for 50,000 steps. Compare within a column, not with the paper.",
        _legend(cells),
        "Accuracy is on the test set, with the weights of the last step: none are chosen by a score. Mean ± standard "
        "deviation over seeds, where there are several. The average leaves out film pairs, which stand in for "
        f"Retrieval, and needs all other columns. {_uncertainty(cells)}",
        "Minutes are of one run, evaluations included; attention's share is of the time of a training step. Column "
        "residual: how far the worst column of LOT's attention matrices is from a sum of one, in the trained model on "
        "one batch; 3e+00 is 300 %. lot-unbalanced imposes no such sum: there it says how uneven the columns are.",
        *alike(records, _budget),
    ]


def _budget(record: Record) -> str:
    cell, lr = record.cell, record.origin.settings["lr"]
    text = f"{cell.steps} steps of {cell.batch_size} examples, lr {lr:g}, tested on {cell.tested:,} examples"
    return f"{COLUMNS[cell.task]}: {text}; {record.provenance.where()}."


def _uncertainty(cells: Sequence[Cell]) -> str:
    """The distance between two equal models that the choice of test examples alone explains."""
    by_task = {
        task: max(2.0 * math.sqrt(2 * cell.accuracy * (1 - cell.accuracy) / cell.tested) for cell in found)
        for task in COLUMNS
        if (found := [cell for cell in cells if cell.task == task])
    }
    told = ", ".join(f"{COLUMNS[task]} {100 * points:.1f}" for task, points in by_task.items())
    return f"Differences below so many points may come from the choice of test examples alone: {told}."


def _legend(cells: Sequence[Cell]) -> str:
    """Legend of the rows that are no mechanism of the registry, and of the figure."""
    shown = {cell.row.removesuffix(MIXED) for cell in cells}
    told = [f"{name} is {variant.meaning}" for name, variant in VARIANTS.items() if name in shown]
    if any(cell.row.endswith(MIXED) for cell in cells):
        told.append(f"{MIXED} adds a depthwise convolution of the values")
    figure = "The figure shows validation accuracy over minutes of training, a line for each seed; LOT's are thick."
    return f"{'; '.join(told)}. {figure}" if told else figure


def _rows(cells: Sequence[Cell]) -> list[str]:
    """In the order of the settings' default, then by name."""
    order = list(ArenaSettings().rows)
    return sorted({cell.row for cell in cells}, key=lambda row: (order.index(row) if row in order else len(order), row))


def _accuracies(cells: Sequence[Cell]) -> Table:
    tasks = [task for task in COLUMNS if any(cell.task == task for cell in cells)]
    averaged = [task for task in tasks if task in PAPERS_TASKS]
    rows = []
    for row in _rows(cells):
        found = {task: [cell.accuracy for cell in cells if (cell.task, cell.row) == (task, row)] for task in tasks}
        means = [statistics.fmean(found[task]) for task in averaged if found[task]]
        comparable = averaged and len(means) == len(averaged)  # an average over fewer tasks is not
        average = f"{100 * statistics.fmean(means):.1f}" if comparable else "–"
        rows.append((row, *(mean_and_deviation(found[task], 100) for task in tasks), average))
    return Table("Test accuracy, %", ("Attention", *(COLUMNS[task] for task in tasks), "Average"), tuple(rows))


def _shown(cells: Sequence[Cell]) -> dict[str, str]:
    """The columns of the paper that there are cells of."""
    return {task: COLUMNS[task] for task in PAPERS_TASKS if any(cell.task == task for cell in cells)}


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
            rows.append(
                (
                    f"{COLUMNS[task]}, {row}",
                    str(len(group)),
                    f"{group[0].steps:,}",
                    f"{statistics.fmean(cell.seconds for cell in group) / 60:.1f}",
                    f"{statistics.fmean(cell.tokens_per_second for cell in group):,.0f}",
                    f"{statistics.fmean(shares):.0%}".replace("%", " %") if shares else "–",
                    largest(cell.residual for cell in group),
                )
            )
    return Table("What a run costs, mean over seeds, and how far its columns are off", columns, tuple(rows))


def _draw(records: list[Record], folder: Path) -> list[Path]:
    """Accuracy on the validation set against minutes of training, a panel per task."""
    cells = [record.cell for record in records]
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


EXPERIMENT = Experiment(
    name="lra",
    about="Table 2: the Long Range Arena, tasks × mechanisms × seeds, at a chosen budget.",
    settings=ArenaSettings,
    cell=Cell,
    plan=plan,
    arranged=in_columns,
    tables=_tables,
    notes=_notes,
    draw=_draw,
    extras=("train",),
)
