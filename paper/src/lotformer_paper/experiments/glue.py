"""Table 4: fine-tune a softmax encoder on a GLUE task, swap its attention, calibrate, fine-tune, score.

Fine-tuning after the swap has two parts, the same for every method: the model first imitates the logits of the softmax
model and its hidden states layer by layer, then it sees labels. With the paper's recipe it sees labels at once.

Each finished cell is a JSON file in the folder of its task, and a run skips the cells it finds there: an interrupted
run goes on where it stopped, and several processes may share the tasks of one output folder. A score is a percentage
of what the softmax model reaches, as in the paper, and always stands next to the residual of the couplings that
reached it; below the table stands what was spent on it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from lotformer import conversion
from lotformer.cli.tables import Table
from lotformer.cli.terminal import Listener
from lotformer.data import glue
from lotformer.data.folder import data_folder
from lotformer.files import new_folder

from ..results.cells import Origin, Record
from ..results.report import largest
from ..results.sources import checkpoint_source, files_source
from .engine import Cells, Experiment, Job, alike, described, names_among
from .every_length import convert_at_every_length
from .glue_settings import METHODS, PAPER_CALIBRATION_LR, PAPER_EPOCHS, GlueSettings, completed
from .inputs import Encoder, GlueData, encoder_weights

_BEFORE_SWAP = ("epochs", "max_steps", "lr", "batch_size", "precision", "max_length", "seed")
"""The settings that the softmax model depends on: any way to convert may share it."""


@dataclass(frozen=True)
class Cell:
    """One task and one method. `score` is the task's metric × 100; None where it was not recorded.

    `recovered` is None where the softmax model scores nothing, as Matthews' correlation does of a single class.
    """

    task: str
    method: str
    score: float | None
    recovered: float | None
    score_before_finetuning: float | None
    residual_max: float | None
    doubly_stochastic_mean: float | None
    seconds: float | None


def plan(
    settings: GlueSettings,
    listen: Listener,
    checkpoint: Encoder = None,
    data_dir: GlueData = None,
    tasks: Annotated[
        str | None, typer.Option(help="Tasks, comma-separated; by default all that --data-dir holds.")
    ] = None,
    methods: Annotated[
        str | None, typer.Option(help=f"Columns, comma-separated; by default all: {', '.join(METHODS)}.")
    ] = None,
) -> Iterator[Job]:
    """For each task a job for the softmax model and one for each column, those that are not asked for too."""
    data, asked = data_folder(data_dir, glue.WANTED), names_among(methods, METHODS)
    chosen = names_among(tasks, glue.TASKS) if tasks else glue.available(data)
    if not chosen:
        raise FileNotFoundError(f"no task in {data}: it should hold {glue.WANTED}.")
    weights = encoder_weights(checkpoint)
    source = checkpoint_source(weights)
    for task in map(glue.TASKS.__getitem__, chosen):
        texts = files_source(f"glue/{task.folder}", glue.files(task, data))
        ours = ("recipe",) if settings.recipe == "ours" else ()  # cells of it are older than the choice
        origin = Origin(described(settings, *ours), {"checkpoint": source, "data": texts})
        fill = partial(_fill, cache(partial(_Bench, task, weights, data, settings, listen)))
        before = Origin({name: origin.settings[name] for name in _BEFORE_SWAP}, origin.sources)
        yield Job({f"{task.name}/softmax": before}, partial(fill, "softmax"), settings.seed)
        for name in dict.fromkeys([*asked, *METHODS]):  # other columns share the table
            yield Job({f"{task.name}/{name}": origin}, partial(fill, name), settings.seed, name in asked)


def _require_metrics() -> None:
    try:
        import torchmetrics  # noqa: F401  scores come last: a missing package is noticed first
        import transformers  # noqa: F401
    except ImportError as error:
        raise ImportError(f"GLUE needs {error.name}: pip install 'lotformer[text]'.") from error


def _arranged(records: list[Record]) -> list[Record]:
    """Tasks and columns in their order; without tasks whose softmax model is not there to compare with."""
    tasks, methods = list(glue.TASKS), ["softmax", *METHODS]
    there = {record.cell.task for record in records if record.cell.method == "softmax"}
    kept = [record for record in records if record.cell.task in there]
    return sorted(kept, key=lambda record: (tasks.index(record.cell.task), methods.index(record.cell.method)))


def _tables(records: list[Record]) -> list[Table]:
    """The paper's Table 4: percent recovered, task by task, with residuals below.

    "–" is not run yet, or has no score to recover.
    """
    cells: list[Cell] = [record.cell for record in records]
    tasks = list(dict.fromkeys(cell.task for cell in cells))
    methods = [m for m in dict.fromkeys(cell.method for cell in cells) if m != "softmax"]
    by_place = {(cell.task, cell.method): cell for cell in cells}
    rows = [_row("softmax, score", [by_place[task, "softmax"].score for task in tasks])]
    for method in methods:
        row = [by_place[task, method].recovered if (task, method) in by_place else None for task in tasks]
        rows.append(_row(f"{method}, % recovered", row))
    for method in methods:
        marginals = [_marginals(by_place.get((task, method))) for task in tasks]
        rows.append((f"{method}, residual max; d.s. error mean", *marginals, ""))
    return [Table("", ("method", *tasks, "mean"), tuple(rows))]


def _notes(records: list[Record]) -> list[str]:
    """Budgets, each stated once for the tasks that share it."""
    told: dict[str, dict[str, None]] = {}
    for task, made in alike(records, lambda record: str(record.cell.task)).items():
        steps = [f"{r.cell.method} {r.provenance.budget['steps']}" for r in made if "steps" in r.provenance.budget]
        spent = [*map(budget, made), *([f"steps with labels: {', '.join(steps)}"] if steps else [])]
        for text in spent:
            told.setdefault(text, {})[task] = None
    return [f"{', '.join(tasks)}: {text}." for text, tasks in told.items()]


def _row(title: str, values: Sequence[float | None]) -> tuple[str, ...]:
    there = [value for value in values if value is not None]
    mean = sum(there) / len(there) if there and len(there) == len(values) else None
    return (title, *("–" if value is None else f"{value:.1f}" for value in (*values, mean)))


def _marginals(cell: Cell | None) -> str:
    if cell is None:
        return "–"
    error = "–" if cell.doubly_stochastic_mean is None else f"{cell.doubly_stochastic_mean:.2f}"
    return f"{largest([cell.residual_max])}; {error}"


def budget(record: Record, seeds: str = "") -> str:
    """Budget and machine of a cell; `seeds` is said in place of its own where several share the line."""
    s = record.origin.settings
    if record.cell.method == "softmax":
        checkpoint = record.origin.sources.get("checkpoint")
        spent = f"{s['epochs']:g} epochs, at most {s['max_steps']} steps, lr {s['lr']:g}"
        spent = f"softmax: {checkpoint.name}, {spent}" if checkpoint else f"softmax: {spent}"
    else:
        steps = s["imitation_steps"]
        imitation = f"{steps} steps of imitation, lr {s['imitation_lr']:g}; " if steps else ""
        calibration = f"{s['calibration_steps']} steps of calibration on {s['calibration_texts']} inputs"
        if s.get("recipe") == "paper":
            calibration = (
                f"the paper's recipe, calibration at {PAPER_CALIBRATION_LR:g} for at most {PAPER_EPOCHS} epochs and "
                f"{s['calibration_steps']} steps with early stopping"
            )
        spent = (
            f"converted: {calibration}; {imitation}"
            f"{s['swap_epochs']:g} epochs with labels, at most {s['max_swap_steps']} steps, lr {s['swap_lr']:g}"
        )
    seeds = seeds or f"seed {s['seed']}"
    learned_in = "" if s["precision"] == "fp32" else f", learned in {s['precision']}"
    sizes = f"batch {s['batch_size']}, {s['max_length']} tokens{learned_in}, {seeds}"
    return f"{spent}; {sizes}; {record.provenance.where()}"


def _fill(bench: Callable[[], _Bench], name: str, cells: Cells) -> None:
    bench().softmax(cells) if name == "softmax" else bench().swapped(name, cells)


class _Bench:
    """One task: its data, and how models learn from them."""

    def __init__(self, task: glue.Task, checkpoint: Path, data: Path, settings: GlueSettings, listen: Listener) -> None:
        from transformers import AutoTokenizer

        self.task, self.checkpoint, self.settings, self.listen = task, checkpoint, settings, listen
        self.tokenizer = AutoTokenizer.from_pretrained(str(checkpoint))
        self.train = list(_batches(self.tokenizer, task, glue.load(task, "train", data), settings))
        self.dev = list(_batches(self.tokenizer, task, glue.load(task, "dev", data), settings))

    def softmax(self, cells: Cells) -> None:
        """The model everything is compared with, fine-tuned once and kept."""
        start, name = time.perf_counter(), f"{self.task.name}/softmax"
        torch.manual_seed(self.settings.seed)
        model = self._model(self.checkpoint)
        steps = min(math.ceil(self.settings.epochs * len(self.train)), self.settings.max_steps)
        self._learn_labels(model, steps, self.settings.lr, 0.0, "softmax", cells)
        with new_folder(cells.place(name)) as draft:
            model.save_pretrained(draft)
        score = evaluate(model, self.dev, self.task)
        cell = Cell(self.task.name, "softmax", score, 100.0, None, None, None, time.perf_counter() - start)
        cells.finish(name, cell, {"steps": steps})

    def swapped(self, name: str, cells: Cells) -> None:
        """The softmax model with another mechanism: calibrated, scored, fine-tuned, scored."""
        method, base = self.settings.taught(METHODS[name]), cells.find(f"{self.task.name}/softmax").score
        start = time.perf_counter()
        torch.manual_seed(self.settings.seed)
        model = self._model(cells.place(f"{self.task.name}/softmax"))
        convert_at_every_length(model, method.mechanism, **method.options)
        if method.objective is not None:
            count = max(5, self.settings.calibration_texts // self.settings.batch_size)
            stride = max(1, len(self.train) // count)
            conversion.calibrate(
                model,
                _unlabelled(self.train[::stride][:count]),
                objective=method.objective,
                steps=self.settings.calibration(len(self.train)),
                lr=method.calibration_lr,
                seed=self.settings.seed,
                on_step=lambda now, total, _: self.listen(f"{self.task.name}: calibrating {name}", now, total),
            )
        before = evaluate(model, self.dev, self.task)
        steps = min(math.ceil(self.settings.swap_epochs * len(self.train)), self.settings.max_swap_steps)
        self._imitate(model, method.mechanism_lr, name, cells)
        if steps:
            self._learn_labels(model, steps, self.settings.swap_lr, method.mechanism_lr, name, cells)
        score = evaluate(model, self.dev, self.task)
        quality = conversion.coupling_quality(model, _unlabelled(self.dev[:: max(1, len(self.dev) // 6)]))
        cell = Cell(
            task=self.task.name,
            method=name,
            score=score,
            recovered=100 * score / base if base else None,
            score_before_finetuning=before,
            residual_max=None if quality is None else quality.residual_max,
            doubly_stochastic_mean=None if quality is None else quality.doubly_stochastic_mean,
            seconds=time.perf_counter() - start,
        )
        cells.finish(f"{self.task.name}/{name}", cell, {"steps": steps})

    def _model(self, checkpoint: str | Path) -> Any:
        from transformers import AutoModelForSequenceClassification

        return AutoModelForSequenceClassification.from_pretrained(str(checkpoint), num_labels=self.task.outputs)

    def _imitate(self, model: nn.Module, mechanism_lr: float, name: str, cells: Cells) -> None:
        """Teach the converted model what the softmax model makes of the task's texts, in every layer."""
        if not self.settings.imitation_steps:
            return
        conversion.finetune(
            model,
            _unlabelled(self.train),
            teacher=self._model(cells.place(f"{self.task.name}/softmax")).eval(),
            layer_weight=1.0,
            steps=self.settings.imitation_steps,
            lr=self.settings.imitation_lr,
            mechanism_lr=mechanism_lr,
            precision=self.settings.precision,
            seed=self.settings.seed,
            checkpoint=cells.begin(f"{self.task.name}/{name}", "imitation"),
            on_step=lambda now, total, _: self.listen(f"{self.task.name}: {name} imitates softmax", now, total),
        )

    def _learn_labels(
        self, model: nn.Module, steps: int, lr: float, mechanism_lr: float, name: str, cells: Cells
    ) -> None:
        conversion.finetune(
            model,
            self.train,
            loss=lambda output, _: output.loss,
            steps=steps,
            lr=lr,
            mechanism_lr=mechanism_lr,
            freeze_embeddings=False,
            precision=self.settings.precision,
            seed=self.settings.seed,
            checkpoint=cells.begin(f"{self.task.name}/{name}", "labels"),
            on_step=lambda now, total, _: self.listen(f"{self.task.name}: fine-tuning {name}", now, total),
        )


def _unlabelled(batches: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [{name: value for name, value in batch.items() if name != "labels"} for batch in batches]


@torch.no_grad()
def evaluate(model: nn.Module, batches: Sequence[dict[str, Tensor]], task: glue.Task) -> float:
    """The task's own metric × 100: Matthews, accuracy, mean of accuracy and F1, or mean of Pearson and Spearman."""
    from torchmetrics import functional as metrics

    model.eval()
    outputs = [(model(**batch).logits, batch["labels"]) for batch in batches]
    logits, labels = (torch.cat(part) for part in zip(*outputs, strict=True))
    if task.metric == "pearson-spearman":
        predicted = logits[:, 0].float()
        parts = [metrics.pearson_corrcoef(predicted, labels), metrics.spearman_corrcoef(predicted, labels)]
    else:
        predicted, classes = logits.argmax(-1), task.outputs
        accuracy = (predicted == labels).float().mean()
        if task.metric == "matthews":
            parts = [metrics.matthews_corrcoef(predicted, labels, task="multiclass", num_classes=classes)]
        elif task.metric == "accuracy-f1":
            parts = [accuracy, metrics.f1_score(predicted, labels, task="binary")]
        else:
            parts = [accuracy]
    return float(100 * torch.stack(parts).mean())


def _batches(
    tokenizer: Any, task: glue.Task, examples: Sequence[glue.Example], settings: GlueSettings
) -> Iterator[dict[str, Tensor]]:
    """Examples as model inputs with labels, texts of like length together; the trainer draws batches at random."""
    ordered = sorted(examples, key=lambda example: sum(map(len, example.texts)))
    kind = torch.float if task.outputs == 1 else torch.long
    for start in range(0, len(ordered), settings.batch_size):
        chunk = ordered[start : start + settings.batch_size]
        texts = [list(side) for side in zip(*(example.texts for example in chunk), strict=True)]
        batch = tokenizer(*texts, padding=True, truncation=True, max_length=settings.max_length, return_tensors="pt")
        yield {**batch, "labels": torch.tensor([example.label for example in chunk], dtype=kind)}


EXPERIMENT = Experiment(
    name="glue",
    about="Table 4: how much of a fine-tuned encoder's GLUE score survives a swap of its attention.",
    settings=GlueSettings,
    cell=Cell,
    plan=plan,
    arranged=_arranged,
    tables=_tables,
    notes=_notes,
    completed=completed,
    require=_require_metrics,
)
