"""The sums that a converted encoder should impose: STS-B without labels and two tasks of GLUE, over several seeds.

Each seed has a folder with the cells of both experiments, `seed0/stsb` and `seed0/glue`. They are made by `stsb` and
`glue`, so cells that the commands of these have left there are found and not run again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from lotformer.cli.tables import Table, mean_and_deviation
from lotformer.cli.terminal import Listener
from lotformer.data.glue import TASKS
from lotformer.settings import Settings, setting

from ..results.cells import Record
from ..results.report import largest
from . import glue, stsb
from .engine import Experiment, Job, alike
from .inputs import Encoder, GlueData

VARIANTS = ("lot-near", "lot-near-keys", "lot-near-none")
_PAIRS = "stsb"
"""By embeddings; what is left of GLUE are the tasks that a classifier was trained for."""


@dataclass(frozen=True)
class BalanceSettings(Settings):
    """The budget of each seed. Everything else is as in the two experiments."""

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


def plan(
    settings: BalanceSettings, listen: Listener, checkpoint: Encoder = None, data_dir: GlueData = None
) -> Iterator[Job]:
    """The jobs of both experiments for every seed."""
    variants = ", ".join(VARIANTS)
    for seed in settings.seeds:
        told = partial(_with_seed, seed, listen)
        pairs = stsb.plan(settings.stsb(seed), told, checkpoint, data_dir, variants)
        tasks = glue.plan(settings.glue(seed), told, checkpoint, data_dir, ", ".join(settings.glue_tasks), variants)
        for jobs, of in ((pairs, stsb.EXPERIMENT), (tasks, glue.EXPERIMENT)):
            yield from (replace(job, below=f"seed{seed}/{of.name}", of=of) for job in jobs)


def _with_seed(seed: int, listen: Listener, what: str, now: int, total: int) -> None:
    listen(f"seed {seed}: {what}", now, total)


def _task(record: Record) -> str:
    return _PAIRS if record.experiment == stsb.EXPERIMENT.name else str(record.cell.task)


def _row(record: Record) -> str:
    return str(record.cell.variant if _task(record) == _PAIRS else record.cell.method)


def _seed(record: Record) -> int:
    return int(record.origin.settings["seed"])


def _stage(records: Iterable[Record]) -> str:
    """The stage of STS-B that is shown: one for all, because stages do not mix in a mean."""
    *_, calibrated, finetuned = stsb.STAGES
    there = {record.cell.stage for record in records if _task(record) == _PAIRS}
    return finetuned if finetuned in there else calibrated


def _arranged(records: list[Record]) -> list[Record]:
    """By seed, then STS-B at its stage, then the tasks of GLUE; none if there is nothing but softmax."""
    stage, tasks, rows = _stage(records), [_PAIRS, *TASKS], ["softmax", *dict.fromkeys((*stsb.VARIANTS, *glue.METHODS))]
    shown = [
        record
        for record in records
        if (record.cell.stage == stage if record.experiment == stsb.EXPERIMENT.name else record.cell.task != _PAIRS)
    ]
    order = sorted(shown, key=lambda one: (_seed(one), tasks.index(_task(one)), rows.index(_row(one))))
    return order if any(_row(record) != "softmax" for record in order) else []


def _tables(records: list[Record]) -> list[Table]:
    tasks = [task for task in TASKS if task != _PAIRS and any(_task(record) == task for record in records)]
    titles = [f"{TASKS[task].folder},\n% recovered" for task in tasks]
    columns = ("variant", "STS-B,\n% of softmax kept", "STS-B,\ncosine", *titles, "residual,\nmax")
    rows = []
    for row in dict.fromkeys((*stsb.VARIANTS, *glue.METHODS)):
        of_row = [record for record in records if _row(record) == row]
        cells = {task: [one.cell for one in of_row if _task(one) == task] for task in (_PAIRS, *tasks)}
        scores = [cell.scores["all"] for cell in cells[_PAIRS]]
        if of_row:
            rows.append(
                (
                    row,
                    _over_seeds([score.recovered for score in scores], 2),
                    _over_seeds([score.cosine for score in scores], 4),
                    *(_over_seeds([cell.recovered for cell in cells[task]], 1) for task in tasks),
                    largest(cell.residual_max for made in cells.values() for cell in made),
                )
            )
    return [Table("What a converted encoder keeps, by the sums that are imposed", columns, tuple(rows))]


def _over_seeds(values: Sequence[float | None], digits: int) -> str:
    there = [value for value in values if value is not None]
    return f"{mean_and_deviation(there, digits=digits)} ({len(there)})" if there else "–"


def _notes(records: list[Record]) -> list[str]:
    """Notes of the table with budgets and machines: a line for all tasks and seeds that share it."""
    return [
        "Mean ± standard deviation over seeds, with the number of seeds in brackets.",
        "Beside rows that sum to one, the masses of the pivots are imposed on the queries and those of the keys on the "
        "keys; with -keys only the latter, with -none neither. lot-near and its variants have pivots that "
        "see the input, and a window of five tokens that is read by softmax. -fixed: with fixed pivots; -cls: the "
        "first token is read by softmax, too. lot-aware is without a window, lot without one and with fixed pivots.",
        f"STS-B, {_stage(records)}: Spearman correlation over all of dev in percent of the softmax model's, and the "
        "mean cosine with its embeddings. Tasks of GLUE: the task's score in percent of the softmax model's.",
        "Residual: the worst relative deviation of a column sum from the mass in force, over all cells of the row. "
        "With -none, what a key receives is taken for its mass, so the residual is rounding and says nothing.",
        *(_spent(made) for made in alike(records, lambda record: _budget(record, "any seed")).values()),
    ]


def _budget(record: Record, seeds: str) -> str:
    return (stsb if _task(record) == _PAIRS else glue).budget(record, seeds)


def _spent(made: list[Record]) -> str:
    seeds, tasks = dict.fromkeys(map(_seed, made)), dict.fromkeys(TASKS[_task(record)].folder for record in made)
    told = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    return f"{', '.join(tasks)}: {_budget(made[0], told)}."


EXPERIMENT = Experiment(
    name="balance",
    about="Which sums a converted encoder should impose: STS-B and tasks of GLUE over several seeds.",
    settings=BalanceSettings,
    cell=None,
    gathers=(stsb.EXPERIMENT.name, glue.EXPERIMENT.name),
    plan=plan,
    arranged=_arranged,
    tables=_tables,
    notes=_notes,
)
