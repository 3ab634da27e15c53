"""The engine of the experiments: one way to run, resume, store and render what a declaration says.

An experiment is an `Experiment` in a module of its own, and a line in `registry`. Its plan turns settings into jobs:
cells with what each depends on, and the function that makes those of them that are missing. Everything else is here:
cells made from something else are refused before any work begins, finished ones are kept, interrupted ones go on from
their checkpoint, and a folder is rendered by the names that its cells carry.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lotformer.cli.tables import Table
from lotformer.cli.terminal import Listener
from lotformer.files import require_writable
from lotformer.reading import read_json
from lotformer.settings import Settings
from lotformer.training.logs import Progress
from lotformer.training.teams import Alone, Team

from ..results.cells import CellFolder, Origin, Record, record_of
from ..results.report import Report

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """Cells that are made together: the stages of a row one after another, or mechanisms that take turns.

    Attributes:
        cells: what each depends on, by its place below the folder of the experiment.
        make: makes those that are missing.
        asked: False for cells that share the table: they are checked, and only made if another job needs them.
        below, of: place and experiment of the cells where an experiment gathers those of others.
    """

    cells: Mapping[str, Origin]
    make: Callable[[Cells], None] = lambda cells: None
    seed: int = 0
    asked: bool = True
    below: str = ""
    of: Experiment | None = None


@dataclass(frozen=True)
class Experiment:
    """The declaration of an experiment.

    Attributes:
        about: one sentence, for the command line.
        cell: class of its cells; a union if there are several.
        plan: jobs from the settings, a listener, and inputs. Inputs are the named arguments that follow, annotated as
            options of the command line, e.g. `data_dir: Annotated[Path | None, typer.Option(help="…")] = None`.
        tables, notes: of the records in the order of `arranged`, which may leave some out.
        draw: draws figures of them and returns the files.
        completed: adds to the settings that were chosen, see `lotformer.cli.settings.with_settings`.
        require: raises an error if a package is missing.
        extras: of the package, named in an error if something of theirs is not installed.
        gathers: names of experiments whose cells this one gathers; it has none of its own.
        processes: its jobs may be made by many processes together, started by torchrun or `accelerate launch`.
    """

    name: str
    about: str
    settings: type[Settings]
    cell: Any
    plan: Callable[..., Iterable[Job]]
    tables: Callable[[list[Record]], Sequence[Table]]
    notes: Callable[[list[Record]], Iterable[str]]
    arranged: Callable[[list[Record]], list[Record]] = lambda records: records
    draw: Callable[[list[Record], Path], list[Path]] | None = None
    completed: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda chosen: chosen
    require: Callable[[], None] = lambda: None
    extras: tuple[str, ...] = ()
    gathers: tuple[str, ...] = ()
    processes: bool = False

    @property
    def inputs(self) -> list[inspect.Parameter]:
        """Of the plan, beside settings and listener."""
        return list(inspect.signature(self.plan, eval_str=True).parameters.values())[2:]


@dataclass(frozen=True)
class Cells:
    """The cells of a run, as its jobs see them: by name, with what each depends on.

    Where many processes make them together, all call the same methods in the same order; the first one reads and
    writes, and the others get what it got.
    """

    store: CellFolder[Any]
    planned: dict[str, tuple[Origin, int]] = field(default_factory=dict)
    team: Team = field(default_factory=Alone)

    @property
    def first(self) -> bool:
        """True in the process whose cell is stored: what the others hand to `finish` is not looked at."""
        return self.team.process.index == 0

    def find(self, name: str) -> Any:
        """The finished cell, or None."""
        return _by_first(self.team, lambda: self.store.find(name, self.planned[name][0]))

    def begin(self, name: str, part: str = "training") -> Path:
        """Note that the cell is begun; returns where this part of it may keep a checkpoint."""
        return _by_first(self.team, lambda: self.store.begin(name, self.planned[name][0], part))

    def finish(self, name: str, cell: Any, budget: Mapping[str, Any] | None = None) -> Any:
        """Store the cell with what was spent on it."""
        origin, seed = self.planned[name]
        return _by_first(self.team, lambda: self.store.finish(name, cell, origin, budget or {}, seed))

    def place(self, name: str) -> Path:
        """A place for the model of the cell."""
        return self.store.folder / name


def silent(what: str, now: int, total: int) -> None:
    """Listen to nothing."""


def run(
    experiment: Experiment,
    settings: Settings,
    out: Path,
    listen: Listener = silent,
    command: str = "",
    **inputs: Any,
) -> list[Any]:
    """Make every cell that is not in `out` yet; returns all that were asked for, in the order of the plan.

    Raises:
        ValueError: `out` holds cells made from something else, or processes were started for an experiment of one.
        OSError: `out` cannot be written.
    """
    experiment.require()
    team = team_of(experiment)
    _by_first(team, lambda: require_writable(out))
    jobs: list[Job] = []
    folders: dict[str, Cells] = {}
    for job in experiment.plan(settings, listen, **inputs):
        made_by = job.of or experiment
        empty = Cells(CellFolder(out / job.below, made_by.cell, made_by.name, command), team=team)
        cells = folders.setdefault(job.below, empty)
        cells.planned.update({name: (origin, job.seed) for name, origin in job.cells.items()})
        for name in job.cells:  # all of them at the door: the last job begins hours after the first
            cells.find(name)
        jobs.append(job)
    asked = [(folders[job.below], name) for job in jobs if job.asked for name in job.cells]
    while jobs:  # a job that is done lets go of its models
        job = jobs.pop(0)
        if job.asked and any(folders[job.below].find(name) is None for name in job.cells):
            job.make(folders[job.below])
            if missing := [name for name in job.cells if folders[job.below].find(name) is None]:
                raise RuntimeError(f"{experiment.name} has not made {', '.join(missing)}.")
    return [cells.find(name) for cells, name in asked]


def team_of(experiment: Experiment) -> Team:
    """The processes that make an experiment together: this one alone, or those that a launcher has started.

    Raises:
        ValueError: there are several, and the experiment is not made for that.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Alone()
    if not experiment.processes:
        raise ValueError(f"{experiment.name} runs in one process: start it without torchrun or `accelerate launch`.")
    from lotformer.training.accelerated import AcceleratedTeam, make_accelerator

    return AcceleratedTeam(make_accelerator())


def _by_first(team: Team, make: Callable[[], T]) -> T:
    """What the first process makes, for all of them; what goes wrong there goes wrong in all."""
    made, error = None, None
    if team.process.index == 0:
        try:
            made = make()
        except (OSError, ValueError) as failure:
            error = failure
    made, error = team.gather((made, error))[0]
    if error is not None:
        raise error
    return made


def render(folder: Path) -> Report:
    """Tables, notes and figures of every cell in a folder, whichever runs made them; nothing is computed.

    Raises:
        ValueError: it holds no finished cell, or cells of several experiments.
    """
    from .registry import EXPERIMENTS  # late: the experiments import this module

    name = name_of(folder)
    if name not in EXPERIMENTS:
        raise ValueError(f"it holds cells of {name!r}; this version knows {', '.join(EXPERIMENTS)}.")
    return report(EXPERIMENTS[name], folder)


def report(experiment: Experiment, folder: Path) -> Report:
    """The report of a folder with cells of this experiment."""
    found = experiment.arranged(records(experiment, folder))
    if not found:
        raise ValueError(f"{folder} holds no finished cell of {experiment.name}.")
    commands = tuple(dict.fromkeys(record.provenance.command for record in found))
    draw = experiment.draw
    drawn = None if draw is None else lambda place: draw(found, place)
    return Report(commands, tuple(experiment.tables(found)), tuple(experiment.notes(found)), drawn)


def records(experiment: Experiment, folder: Path) -> list[Record]:
    """Every finished cell of the experiment below a folder, ordered by place.

    Raises:
        ValueError: there are cells of others.
    """
    from .registry import EXPERIMENTS

    kinds = {name: EXPERIMENTS[name].cell for name in experiment.gathers} or {experiment.name: experiment.cell}
    found = _results(folder)
    if others := [name for name in dict.fromkeys(found.values()) if name not in kinds]:
        raise ValueError(f"{folder} holds cells of {' and '.join(others)} where {' and '.join(kinds)} was expected.")
    return [record_of(kinds[name], path) for path, name in found.items()]


def name_of(folder: Path) -> str:
    """The name that all results in a folder carry, or that of the experiment that gathers them.

    Raises:
        ValueError: there is none, or there are several; with their names.
    """
    from .registry import EXPERIMENTS

    names = dict.fromkeys(_results(folder).values())
    if not names:
        raise ValueError("it holds no result: expected JSON files that name their experiment, as a run leaves them.")
    if len(names) == 1:
        return next(iter(names))
    gatherer = [one.name for one in EXPERIMENTS.values() if set(names) <= set(one.gathers)]
    if len(gatherer) != 1:
        raise ValueError(f"it holds results of {' and '.join(names)}: give the folder of one of them.")
    return gatherer[0]


def _results(folder: Path) -> dict[Path, str]:
    """The names that the results in a folder carry, by file; other JSON, e.g. of models, is none."""
    paths = sorted(folder.rglob("*.json"), key=lambda path: (path.parent, path.stem))
    plain = {path: read_json(path) for path in paths}
    return {
        path: str(found["experiment"])
        for path, found in plain.items()
        if isinstance(found, dict) and {"experiment", "provenance"} <= found.keys()
    }


def described(settings: Settings, *without: str) -> dict[str, Any]:
    """Settings as plain values that a cell depends on, without those that only say which cells to make."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in dataclasses.asdict(settings).items()
        if name not in without
    }


def names_among(text: str | None, known: Iterable[str]) -> list[str]:
    """Names from a text with commas between them; all that are known from None.

    Raises:
        ValueError: one is not known.
    """
    known = list(known)
    names = known if text is None else [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is not one of {', '.join(known)}.")
    return names


def alike(records: Iterable[Record], told: Callable[[Record], str]) -> dict[str, list[Record]]:
    """Records by what is told of them, e.g. what was spent: notes say it once."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(told(record), []).append(record)
    return groups


@dataclass(frozen=True)
class Told:
    """Passes the steps of a training run on to a listener."""

    what: str
    listen: Listener

    def started(self, step: int, steps: int) -> None:
        self.listen(self.what, step, steps)

    def stepped(self, progress: Progress) -> None:
        self.listen(self.what, progress.step, progress.steps)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def ended(self) -> None:
        pass
