"""Which sums should a converted encoder impose? STS-B without labels and two tasks of GLUE, over several seeds.

Each seed has a folder with the cells of both experiments, `seed0/stsb` and `seed0/glue`. They are made by `stsb` and
`glue`, so cells that the commands of these have left there are found and not run again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lotformer.cli.tables import Table, mean_and_deviation
from lotformer.data.glue import TASKS
from lotformer.settings import Settings, setting

from ..results.cells import CellFolder, Listener, Record
from ..results.report import Report
from . import glue, stsb

NAME = "balance"

VARIANTS = ("lot-near", "lot-near-keys", "lot-near-none")
_PAIRS = "stsb"
"""By embeddings; what is left of GLUE are the tasks that a classifier was trained for."""


@dataclass(frozen=True)
class BalanceSettings(Settings):
    """How much is spent on each seed. What is not here is as in the two experiments."""

    seeds: tuple[int, ...] = setting((0, 1, 2), "Random seeds, each with a folder of its own.", at_least=0)
    stsb_calibration_steps: int = setting(250, "STS-B: steps of calibration.", at_least=1)
    stsb_finetune_steps: int = setting(0, "STS-B: steps of fine-tuning without labels.", at_least=0)
    glue_tasks: tuple[str, ...] = setting(
        ("cola", "mrpc"), "Tasks of GLUE to fine-tune a classifier for, without STS-B."
    )
    glue_epochs: float = setting(3.0, "GLUE: epochs of the softmax model.", at_least=0)
    glue_max_steps: int = setting(400, "GLUE: most steps for the softmax model.", at_least=1)
    glue_calibration_steps: int = setting(150, "GLUE: steps of calibration.", at_least=0)
    glue_imitation_steps: int = setting(100, "GLUE: steps of imitating the softmax model.", at_least=0)
    glue_swap_epochs: float = setting(0.0, "GLUE: epochs with labels after the imitation.", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for task in self.glue_tasks:
            if task not in TASKS or task == _PAIRS:
                known = ", ".join(name for name in TASKS if name != _PAIRS)
                raise ValueError(f"glue_tasks must be among {known}, got {task!r}.")

    def stsb(self, seed: int) -> stsb.StsbSettings:
        return stsb.StsbSettings(
            calibration_steps=self.stsb_calibration_steps, finetune_steps=self.stsb_finetune_steps, seed=seed
        )

    def glue(self, seed: int) -> glue.GlueSettings:
        return glue.GlueSettings(
            epochs=self.glue_epochs,
            max_steps=self.glue_max_steps,
            calibration_steps=self.glue_calibration_steps,
            imitation_steps=self.glue_imitation_steps,
            swap_epochs=self.glue_swap_epochs,
            seed=seed,
        )


def run(
    checkpoint: Path,
    data: Path,
    out: Path,
    settings: BalanceSettings,
    listen: Listener = lambda what, now, total: None,
    command: str = "",
) -> None:
    """Fill every cell of every seed that is not in `out` yet.

    Raises:
        ValueError: `out` holds cells made from something else.
    """
    for seed in settings.seeds:  # all of them at the door: the last seed begins hours after the first
        pairs, tasks = _places(out, seed)
        stsb.check(checkpoint, data, pairs, VARIANTS, settings.stsb(seed))
        glue.check(checkpoint, data, tasks, settings.glue_tasks, VARIANTS, settings.glue(seed))
    for seed in settings.seeds:
        pairs, tasks = _places(out, seed)
        told = partial(_with_seed, seed, listen)
        stsb.run(checkpoint, data, pairs, VARIANTS, settings.stsb(seed), told, command)
        glue.run(checkpoint, data, tasks, settings.glue_tasks, VARIANTS, settings.glue(seed), told, command)


def holds(folder: Path) -> bool:
    """Whether a folder is laid out as one of this experiment, whichever commands have filled it."""
    return any(place.is_dir() for kind in (stsb.NAME, glue.NAME) for place in folder.glob(f"seed*/{kind}"))


def render(folder: Path) -> Report:
    """The table of the finished cells of all seeds, whichever runs made them, and below it what was spent on them.

    Raises:
        ValueError: there is none.
    """
    stage = _last_stage(folder)
    found = list(_found(folder, stage))
    table = _table(found)
    if not table.rows:
        raise ValueError(f"{folder} holds no finished cell.")
    commands = tuple(dict.fromkeys(one.record.provenance.command for one in found))
    return Report(commands, (table,), (*_meaning(stage), *_budgets(found)))


@dataclass(frozen=True)
class _Found:
    """A finished cell of one seed: the task it is of, and the row it belongs in."""

    task: str
    row: str
    seed: int
    record: Record

    def budget(self, seeds: str) -> str:
        experiment = stsb if self.record.experiment == stsb.NAME else glue
        return experiment.budget(self.record, seeds)


def _places(out: Path, seed: int) -> tuple[Path, Path]:
    return out / f"seed{seed}" / stsb.NAME, out / f"seed{seed}" / glue.NAME


def _with_seed(seed: int, listen: Listener, what: str, now: int, total: int) -> None:
    listen(f"seed {seed}: {what}", now, total)


def _last_stage(folder: Path) -> str:
    """The stage of STS-B that is shown: one for all, because stages do not mix in a mean."""
    *_, calibrated, finetuned = stsb.STAGES
    return finetuned if any(folder.glob(f"seed*/{stsb.NAME}/*/{finetuned}.json")) else calibrated


def _found(folder: Path, stage: str) -> Iterator[_Found]:
    names = [place.name.removeprefix("seed") for place in folder.glob("seed*")]
    for seed in sorted(int(name) for name in names if name.isdecimal()):
        pairs, tasks = _places(folder, seed)
        for row in stsb.VARIANTS:
            record = CellFolder(pairs / row, stsb.Cell, stsb.NAME).record(stage)
            if record is not None:
                yield _Found(_PAIRS, row, seed, record)
        for task in (name for name in TASKS if name != _PAIRS):
            cells = CellFolder(tasks / task, glue.Cell, glue.NAME)
            for row in ("softmax", *glue.METHODS):
                record = cells.record(row)
                if record is not None:
                    yield _Found(task, row, seed, record)


def _table(found: Sequence[_Found]) -> Table:
    tasks = [task for task in TASKS if task != _PAIRS and any(one.task == task for one in found)]
    titles = [f"{TASKS[task].folder},\n% recovered" for task in tasks]
    columns = ("variant", "STS-B,\n% of softmax kept", "STS-B,\ncosine", *titles, "residual,\nmax")
    rows = []
    for row in dict.fromkeys((*stsb.VARIANTS, *glue.METHODS)):
        of_row = [one for one in found if one.row == row]
        cells = {task: [one.record.cell for one in of_row if one.task == task] for task in (_PAIRS, *tasks)}
        scores = [cell.scores["all"] for cell in cells[_PAIRS]]
        residuals = [cell.residual_max for made in cells.values() for cell in made if cell.residual_max is not None]
        if any(cells.values()):
            rows.append(
                (
                    row,
                    _over_seeds([score.recovered for score in scores], 2),
                    _over_seeds([score.cosine for score in scores], 4),
                    *(_over_seeds([cell.recovered for cell in cells[task]], 1) for task in tasks),
                    f"{max(residuals):.0e}" if residuals else "–",
                )
            )
    return Table("What a converted encoder keeps, by the sums that are imposed", columns, tuple(rows))


def _over_seeds(values: Sequence[float | None], digits: int) -> str:
    there = [value for value in values if value is not None]
    return f"{mean_and_deviation(there, digits=digits)} ({len(there)})" if there else "–"


def _meaning(stage: str) -> tuple[str, ...]:
    """How to read the table."""
    return (
        "Mean ± standard deviation over seeds, with the number of seeds in brackets.",
        "Beside rows that sum to one, the masses of the pivots are imposed on the queries and those of the keys on the "
        "keys; with -keys only the latter, with -none neither. lot-near and its variants have pivots that "
        "see the input, and a window of five tokens that is read by softmax. -fixed: with fixed pivots; -cls: the "
        "first token is read by softmax, too. lot-aware is without a window, lot without one and with fixed pivots.",
        f"STS-B, {stage}: Spearman correlation over all of dev in percent of the softmax model's, and the mean cosine "
        "with its embeddings. Tasks of GLUE: the task's score in percent of the softmax model's.",
        "Residual: the worst relative deviation of a column sum from the mass in force, over all cells of the row. "
        "With -none, what a key receives is taken for its mass, so the residual is rounding and says nothing.",
    )


def _budgets(found: Sequence[_Found]) -> list[str]:
    """What was spent and where: a line for all tasks and seeds that share it."""
    alike: dict[str, list[_Found]] = {}
    for one in found:
        alike.setdefault(one.budget("any seed"), []).append(one)
    lines = []
    for group in alike.values():
        seeds = dict.fromkeys(str(one.seed) for one in group)
        tasks = dict.fromkeys(TASKS[one.task].folder for one in group)
        told = f"seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}"
        lines.append(f"{', '.join(tasks)}: {group[0].budget(told)}.")
    return lines
