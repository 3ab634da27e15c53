"""Table 4: fine-tune a softmax encoder on a GLUE task, swap its attention, calibrate, fine-tune, score.

Each finished cell is a JSON file in the output folder, and a run skips the cells it finds there: an interrupted run
goes on where it stopped. A score is a percentage of what the softmax model reaches, as in the paper, and always
stands next to the residual of the couplings that reached it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import conversion
from ..conversion.objectives import Objective
from ..data import glue


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
}
"""T2R learns its feature maps by fine-tuning alone; T2R-HH and Hedgehog first match attention matrices row by row."""


@dataclass(frozen=True)
class Settings:
    """How long and how fast; epochs are capped at `max_steps` steps (softmax) and `max_swap_steps` (converted)."""

    epochs: float = 3.0
    max_steps: int = 100_000
    lr: float = 5e-5
    swap_epochs: float = 2.0
    max_swap_steps: int = 100_000
    swap_lr: float = 2e-5
    batch_size: int = 32
    max_length: int = 128
    calibration_steps: int = 250
    calibration_texts: int = 2560
    seed: int = 0


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


Listener = Callable[[str, int, int], None]


def run(
    checkpoint: str | Path,
    data: Path,
    out: Path,
    tasks: Sequence[str],
    methods: Sequence[str],
    settings: Settings,
    listen: Listener = lambda what, now, total: None,
) -> list[Cell]:
    """Fill every cell of tasks × methods that is not in `out` yet; returns all of them, softmax first."""
    for chosen, known in ((tasks, list(glue.TASKS)), (methods, list(METHODS))):
        for name in chosen:
            if name not in known:
                raise ValueError(f"{name!r} is not one of {', '.join(known)}.")
    cells = []
    for task_name in tasks:
        bench = _Bench(glue.TASKS[task_name], checkpoint, data, out / task_name, settings, listen)
        cells.append(bench.softmax())
        cells += [bench.swapped(name, METHODS[name]) for name in methods]
    return cells


def table(cells: Sequence[Cell]) -> str:
    """The paper's Table 4 in Markdown: percent recovered, task by task, with residuals below."""
    tasks = list(dict.fromkeys(cell.task for cell in cells))
    methods = [m for m in dict.fromkeys(cell.method for cell in cells) if m != "softmax"]
    by_place = {(cell.task, cell.method): cell for cell in cells}
    lines = [f"| | {' | '.join(tasks)} | mean |", f"|---|{'---|' * (len(tasks) + 1)}"]
    scores = [by_place[task, "softmax"].score for task in tasks]
    lines.append(f"| softmax, score | {' | '.join(f'{s:.1f}' for s in scores)} | {sum(scores) / len(scores):.1f} |")
    for method in methods:
        row = [by_place[task, method].recovered for task in tasks]
        lines.append(f"| {method}, % recovered | {' | '.join(f'{r:.1f}' for r in row)} | {sum(row) / len(row):.1f} |")
    for method in methods:
        marginals = [_marginals(by_place[task, method]) for task in tasks]
        lines.append(f"| {method}, residual max; d.s. error mean | {' | '.join(marginals)} | |")
    return "\n".join(lines)


def _marginals(cell: Cell) -> str:
    residual = "–" if cell.residual_max is None else f"{cell.residual_max:.0e}"
    error = "–" if cell.doubly_stochastic_mean is None else f"{cell.doubly_stochastic_mean:.2f}"
    return f"{residual}; {error}"


class _Bench:
    """One task: its data, its fine-tuned softmax model, and the cells made from it."""

    def __init__(
        self, task: glue.Task, checkpoint: str | Path, data: Path, out: Path, settings: Settings, listen: Listener
    ) -> None:
        from transformers import AutoTokenizer

        self.task, self.checkpoint, self.out, self.settings, self.listen = task, checkpoint, out, settings, listen
        self.tokenizer = AutoTokenizer.from_pretrained(str(checkpoint))
        self.train = list(_batches(self.tokenizer, task, glue.load(task, "train", data), settings))
        self.dev = list(_batches(self.tokenizer, task, glue.load(task, "dev", data), settings))
        out.mkdir(parents=True, exist_ok=True)

    def softmax(self) -> Cell:
        """The model everything is compared with, fine-tuned once and kept."""
        found = self._finished("softmax")
        if found is not None:
            return found
        start = time.perf_counter()
        torch.manual_seed(self.settings.seed)
        model = self._model(self.checkpoint)
        steps = min(math.ceil(self.settings.epochs * len(self.train)), self.settings.max_steps)
        self._finetune(model, steps, self.settings.lr, 0.0, "softmax")
        model.save_pretrained(self.out / "softmax")
        score = evaluate(model, self.dev, self.task)
        return self._finish(
            Cell(self.task.name, "softmax", score, 100.0, None, None, None, time.perf_counter() - start)
        )

    def swapped(self, name: str, method: Method) -> Cell:
        """The softmax model with another mechanism: calibrated, scored, fine-tuned, scored."""
        found = self._finished(name)
        if found is not None:
            return found
        base = self.softmax().score
        start = time.perf_counter()
        torch.manual_seed(self.settings.seed)
        model = self._model(self.out / "softmax")
        conversion.convert(model, method.mechanism, **method.options)
        if method.objective is not None:
            count = max(5, self.settings.calibration_texts // self.settings.batch_size)
            stride = max(1, len(self.train) // count)
            inputs = [{k: v for k, v in batch.items() if k != "labels"} for batch in self.train[::stride][:count]]
            conversion.calibrate(
                model,
                inputs,
                objective=method.objective,
                steps=self.settings.calibration_steps,
                lr=method.calibration_lr,
                seed=self.settings.seed,
                on_step=lambda now, total, _: self.listen(f"{self.task.name}: calibrating {name}", now, total),
            )
        before = evaluate(model, self.dev, self.task)
        steps = min(math.ceil(self.settings.swap_epochs * len(self.train)), self.settings.max_swap_steps)
        self._finetune(model, steps, self.settings.swap_lr, method.mechanism_lr, name)
        score = evaluate(model, self.dev, self.task)
        inputs = [{k: v for k, v in batch.items() if k != "labels"} for batch in self.dev]
        quality = conversion.coupling_quality(model, inputs[:: max(1, len(inputs) // 6)])
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
            )
        )

    def _model(self, checkpoint: str | Path) -> Any:
        from transformers import AutoModelForSequenceClassification

        return AutoModelForSequenceClassification.from_pretrained(str(checkpoint), num_labels=self.task.outputs)

    def _finetune(self, model: nn.Module, steps: int, lr: float, mechanism_lr: float, name: str) -> None:
        conversion.finetune(
            model,
            self.train,
            loss=lambda output, _: output.loss,
            steps=steps,
            lr=lr,
            mechanism_lr=mechanism_lr,
            freeze_embeddings=False,
            seed=self.settings.seed,
            checkpoint=self.out / f"{name}.checkpoint",
            on_step=lambda now, total, _: self.listen(f"{self.task.name}: fine-tuning {name}", now, total),
        )

    def _finished(self, name: str) -> Cell | None:
        path = self.out / f"{name}.json"
        return Cell(**json.loads(path.read_text())["cell"]) if path.is_file() else None

    def _finish(self, cell: Cell) -> Cell:
        record = {"cell": asdict(cell), "settings": asdict(self.settings), "torch": torch.__version__}
        (self.out / f"{cell.method}.json").write_text(json.dumps(record, indent=1))
        (self.out / f"{cell.method}.checkpoint").unlink(missing_ok=True)
        return cell


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
