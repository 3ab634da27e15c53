"""Table 4: fine-tune a softmax encoder on a GLUE task, swap its attention, calibrate, fine-tune, score.

Fine-tuning after the swap has two parts, the same for every method: the model first imitates the logits of the softmax
model and its hidden states layer by layer, then it sees labels.

Each finished cell is a JSON file in the folder of its task, and a run skips the cells it finds there: an interrupted
run goes on where it stopped, and several processes may share the tasks of one output folder. A score is a percentage
of what the softmax model reaches, as in the paper, and always stands next to the residual of the couplings that
reached it; below the table stands what was spent on it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import conversion
from ..conversion.learning.objectives import Objective
from ..data import glue
from ..results.cells import CellFolder, Listener, machine, stamp

COMMAND = "lotformer experiment glue"


@dataclass(frozen=True)
class Method:
    """A column of the table: a mechanism and how its new parameters are taught before fine-tuning.

    `objective` None skips calibration; `mechanism_lr` is the rate of the new parameters during fine-tuning.
    """

    mechanism: str
    objective: Objective | None
    options: dict[str, Any] = field(default_factory=dict)
    calibration_lr: float = 2e-2
    mechanism_lr: float = 5e-3


METHODS: dict[str, Method] = {
    "t2r": Method("t2r", None, mechanism_lr=1e-3),
    "t2r-hh": Method("t2r", "attention", calibration_lr=1e-2, mechanism_lr=1e-3),
    "hedgehog": Method("hedgehog", "attention", calibration_lr=1e-2, mechanism_lr=1e-3),
    "lot": Method("lot", "output"),
    "lot-uniform": Method("lot", "output", {"key_masses": "uniform"}),
    "lot-aware": Method("lot", "output", {"pivots": "input-aware"}),
    "lot-aware-uniform": Method("lot", "output", {"pivots": "input-aware", "key_masses": "uniform"}),
}
"""T2R learns its feature maps by fine-tuning alone; T2R-HH and Hedgehog first match attention matrices row by row.
The last two have pivots that see the input."""


@dataclass(frozen=True)
class Settings:
    """How long and how fast; epochs are capped at `max_steps` steps (softmax) and `max_swap_steps` (converted)."""

    epochs: float = 3.0
    max_steps: int = 100_000
    lr: float = 5e-5
    imitation_steps: int = 1000
    imitation_lr: float = 1e-4
    swap_epochs: float = 1.0
    max_swap_steps: int = 100_000
    swap_lr: float = 2e-5
    batch_size: int = 32
    max_length: int = 128
    calibration_steps: int = 250
    calibration_texts: int = 2560
    seed: int = 0


_FORMERLY = {"imitation_steps": 0}

_BEFORE_SWAP = ("epochs", "max_steps", "lr", "batch_size", "max_length", "seed", "checkpoint")
"""The settings that the softmax model depends on: any way to convert may share it."""


@dataclass(frozen=True)
class Cell:
    """One task and one method. `score` is the task's metric × 100."""

    task: str
    method: str
    score: float
    recovered: float
    score_before_finetuning: float | None
    residual_max: float | None
    doubly_stochastic_mean: float | None
    seconds: float


def run(
    checkpoint: str | Path,
    data: Path,
    out: Path,
    tasks: Sequence[str],
    methods: Sequence[str],
    settings: Settings,
    listen: Listener = lambda what, now, total: None,
    command: str = COMMAND,
) -> list[Cell]:
    """Fill every cell of tasks × methods that is not in `out` yet; returns all of them, softmax first.

    Raises:
        ValueError: a task or method is unknown, or `out` holds cells of a chosen task with other settings.
    """
    for chosen, known in ((tasks, list(glue.TASKS)), (methods, list(METHODS))):
        for name in chosen:
            if name not in known:
                raise ValueError(f"{name!r} is not one of {', '.join(known)}.")
    stamped = stamp(settings, checkpoint)
    folders = {task: CellFolder(out / task, _restore, command, _FORMERLY) for task in tasks}
    for folder in folders.values():  # at the door, not after hours; cells of other columns share the table
        folder.find("softmax", _before_swap(stamped))
        for name in METHODS:
            folder.find(name, stamped)
    cells = []
    for task, folder in folders.items():
        bench = _Bench(glue.TASKS[task], checkpoint, data, folder, settings, stamped, listen)
        cells.append(bench.softmax())
        cells += [bench.swapped(name, METHODS[name]) for name in methods]
    return cells


def _before_swap(stamped: Mapping[str, Any]) -> dict[str, Any]:
    return {name: stamped[name] for name in _BEFORE_SWAP}


def report(out: Path) -> str:
    """The table of every cell in the folder, whichever runs made them, and below it what was spent on them."""
    cells: list[Cell] = []
    budgets: dict[str, list[str]] = {}
    for task in glue.TASKS:
        folder = CellFolder(out / task, _restore, COMMAND)
        found = {name: record for name in ("softmax", *METHODS) if (record := folder.record(name)) is not None}
        if "softmax" not in found:
            continue
        cells += [_restore(record["cell"]) for record in found.values()]
        for record in found.values():
            tasks = budgets.setdefault(_budget(record), [])
            if task not in tasks:
                tasks.append(task)
        steps = [f"{name} {record['budget']['steps']}" for name, record in found.items() if "budget" in record]
        if steps:
            budgets.setdefault(f"steps with labels: {', '.join(steps)}", []).append(task)
    notes = [f"- {', '.join(tasks)}: {text}." for text, tasks in budgets.items()]
    return "\n".join([table(cells), "", *notes])


def table(cells: Sequence[Cell]) -> str:
    """The paper's Table 4 in Markdown: percent recovered, task by task, with residuals below; "–" is not run yet."""
    tasks = list(dict.fromkeys(cell.task for cell in cells))
    methods = [m for m in dict.fromkeys(cell.method for cell in cells) if m != "softmax"]
    by_place = {(cell.task, cell.method): cell for cell in cells}
    lines = [f"| | {' | '.join(tasks)} | mean |", f"|---|{'---|' * (len(tasks) + 1)}"]
    lines.append(_row("softmax, score", [by_place[task, "softmax"].score for task in tasks]))
    for method in methods:
        row = [by_place[task, method].recovered if (task, method) in by_place else None for task in tasks]
        lines.append(_row(f"{method}, % recovered", row))
    for method in methods:
        marginals = [_marginals(by_place.get((task, method))) for task in tasks]
        lines.append(f"| {method}, residual max; d.s. error mean | {' | '.join(marginals)} | |")
    return "\n".join(lines)


def _row(title: str, values: Sequence[float | None]) -> str:
    there = [value for value in values if value is not None]
    mean = sum(there) / len(there) if there and len(there) == len(values) else None
    shown = ["–" if value is None else f"{value:.1f}" for value in (*values, mean)]
    return f"| {title} | {' | '.join(shown)} |"


def _marginals(cell: Cell | None) -> str:
    if cell is None:
        return "–"
    residual = "–" if cell.residual_max is None else f"{cell.residual_max:.0e}"
    error = "–" if cell.doubly_stochastic_mean is None else f"{cell.doubly_stochastic_mean:.2f}"
    return f"{residual}; {error}"


def _budget(record: Mapping[str, Any]) -> str:
    s = record["settings"]
    if record["cell"]["method"] == "softmax":
        spent = f"{s['epochs']:g} epochs, at most {s['max_steps']} steps, lr {s['lr']:g}"
        spent = f"softmax: {s['checkpoint']}, {spent}" if "checkpoint" in s else f"softmax: {spent}"
    else:
        imitated = s.get("imitation_steps", 0)
        imitation = f"{imitated} steps of imitation, lr {s['imitation_lr']:g}; " if imitated else ""
        spent = (
            f"converted: {s['calibration_steps']} steps of calibration on {s['calibration_texts']} inputs; {imitation}"
            f"{s['swap_epochs']:g} epochs with labels, at most {s['max_swap_steps']} steps, lr {s['swap_lr']:g}"
        )
    return f"{spent}; batch {s['batch_size']}, {s['max_length']} tokens, seed {s['seed']}; {machine(record)}"


def _restore(plain: dict[str, Any]) -> Cell:
    return Cell(**plain)


class _Bench:
    """One task: its data, its fine-tuned softmax model, and the cells made from it."""

    def __init__(
        self,
        task: glue.Task,
        checkpoint: str | Path,
        data: Path,
        cells: CellFolder[Cell],
        settings: Settings,
        stamped: Mapping[str, Any],
        listen: Listener,
    ) -> None:
        from transformers import AutoTokenizer

        self.task, self.checkpoint, self.cells, self.listen = task, checkpoint, cells, listen
        self.settings, self.stamped = settings, stamped
        self.tokenizer = AutoTokenizer.from_pretrained(str(checkpoint))
        self.train = list(_batches(self.tokenizer, task, glue.load(task, "train", data), settings))
        self.dev = list(_batches(self.tokenizer, task, glue.load(task, "dev", data), settings))

    def softmax(self) -> Cell:
        """The model everything is compared with, fine-tuned once and kept."""
        found = self.cells.find("softmax", _before_swap(self.stamped))
        if found is not None:
            return found
        start = time.perf_counter()
        torch.manual_seed(self.settings.seed)
        model = self._model(self.checkpoint)
        steps = min(math.ceil(self.settings.epochs * len(self.train)), self.settings.max_steps)
        self._learn_labels(model, steps, self.settings.lr, 0.0, "softmax")
        model.save_pretrained(self.cells.folder / "softmax")
        score = evaluate(model, self.dev, self.task)
        seconds = time.perf_counter() - start
        return self._finish(Cell(self.task.name, "softmax", score, 100.0, None, None, None, seconds), steps)

    def swapped(self, name: str, method: Method) -> Cell:
        """The softmax model with another mechanism: calibrated, scored, fine-tuned, scored."""
        found = self.cells.find(name, self.stamped)
        if found is not None:
            return found
        base = self.softmax().score
        start = time.perf_counter()
        torch.manual_seed(self.settings.seed)
        model = self._model(self.cells.folder / "softmax")
        conversion.convert(model, method.mechanism, **method.options)
        if method.objective is not None:
            count = max(5, self.settings.calibration_texts // self.settings.batch_size)
            stride = max(1, len(self.train) // count)
            conversion.calibrate(
                model,
                _unlabelled(self.train[::stride][:count]),
                objective=method.objective,
                steps=self.settings.calibration_steps,
                lr=method.calibration_lr,
                seed=self.settings.seed,
                on_step=lambda now, total, _: self.listen(f"{self.task.name}: calibrating {name}", now, total),
            )
        before = evaluate(model, self.dev, self.task)
        steps = min(math.ceil(self.settings.swap_epochs * len(self.train)), self.settings.max_swap_steps)
        self._imitate(model, method.mechanism_lr, name)
        if steps:
            self._learn_labels(model, steps, self.settings.swap_lr, method.mechanism_lr, name)
        score = evaluate(model, self.dev, self.task)
        quality = conversion.coupling_quality(model, _unlabelled(self.dev[:: max(1, len(self.dev) // 6)]))
        return self._finish(
            Cell(
                task=self.task.name,
                method=name,
                score=score,
                recovered=100 * score / base,
                score_before_finetuning=before,
                residual_max=None if quality is None else quality.residual_max,
                doubly_stochastic_mean=None if quality is None else quality.doubly_stochastic_mean,
                seconds=time.perf_counter() - start,
            ),
            steps,
        )

    def _model(self, checkpoint: str | Path) -> Any:
        from transformers import AutoModelForSequenceClassification

        return AutoModelForSequenceClassification.from_pretrained(str(checkpoint), num_labels=self.task.outputs)

    def _imitate(self, model: nn.Module, mechanism_lr: float, name: str) -> None:
        """Teach the converted model what the softmax model makes of the task's texts, in every layer."""
        if not self.settings.imitation_steps:
            return
        conversion.finetune(
            model,
            _unlabelled(self.train),
            teacher=self._model(self.cells.folder / "softmax").eval(),
            layer_weight=1.0,
            steps=self.settings.imitation_steps,
            lr=self.settings.imitation_lr,
            mechanism_lr=mechanism_lr,
            seed=self.settings.seed,
            checkpoint=self.cells.begin(name, self.stamped, "imitation"),
            on_step=lambda now, total, _: self.listen(f"{self.task.name}: {name} imitates softmax", now, total),
        )

    def _learn_labels(self, model: nn.Module, steps: int, lr: float, mechanism_lr: float, name: str) -> None:
        conversion.finetune(
            model,
            self.train,
            loss=lambda output, _: output.loss,
            steps=steps,
            lr=lr,
            mechanism_lr=mechanism_lr,
            freeze_embeddings=False,
            seed=self.settings.seed,
            checkpoint=self.cells.begin(name, self.stamped, "labels"),
            on_step=lambda now, total, _: self.listen(f"{self.task.name}: fine-tuning {name}", now, total),
        )

    def _finish(self, cell: Cell, steps: int) -> Cell:
        return self.cells.finish(cell.method, cell, self.stamped, {"steps": steps}, self.settings.seed)


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
    tokenizer: Any, task: glue.Task, examples: Sequence[glue.Example], settings: Settings
) -> Iterator[dict[str, Tensor]]:
    """Examples as model inputs with labels, texts of like length together; the trainer draws batches at random."""
    ordered = sorted(examples, key=lambda example: sum(map(len, example.texts)))
    kind = torch.float if task.outputs == 1 else torch.long
    for start in range(0, len(ordered), settings.batch_size):
        chunk = ordered[start : start + settings.batch_size]
        texts = [list(side) for side in zip(*(example.texts for example in chunk), strict=True)]
        batch = tokenizer(*texts, padding=True, truncation=True, max_length=settings.max_length, return_tensors="pt")
        yield {**batch, "labels": torch.tensor([example.label for example in chunk], dtype=kind)}
