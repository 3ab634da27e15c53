"""`finetune`: let all weights adapt to the new attention, without labels or on a task."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...attention.softmax import SoftmaxAttention
from ...data.batches import Batch, main_tensor, pooled, real_tokens, require_batches, require_finite
from ...nn.checks import require_count, require_positive
from ...training.checkpoints import Checkpoint, check_writable
from ...training.fingerprints import fingerprint
from ...training.finite import NonFiniteError, better
from ...training.loop import Loop, LoopSettings, OnStep
from ...training.precision import widened
from ...training.stream import Shuffled
from ...training.updates import LocalUpdates, ParamGroup
from ..calling import call
from ..hosts.sites import MECHANISM, converted, mechanism_of, require_converted, require_unfolded, transporting
from .exact_share import ExactShare
from .held_back import apart, require_learning, require_share
from .identity import identity
from .objectives import tells_nothing

TaskLoss = Callable[[Any, Batch], Tensor]
"""Maps a model's output and the batch it came from to a scalar loss."""


@dataclass(frozen=True)
class FinetuningReport:
    """The outcome of fine-tuning.

    Attributes:
        losses: at every step. best_step: whose weights were kept; the last unless batches were held back.
        held_before, held_after: the mean loss on the held-back batches, before and with the weights that were kept;
            None if there are none.
        slowed: the factor by which the rates were cut on the way. skipped: steps that were not finite.
    """

    steps: int
    seconds: float
    losses: tuple[float, ...]
    best_step: int
    held_before: float | None = None
    held_after: float | None = None
    slowed: float = 1.0
    skipped: int = 0

    def __str__(self) -> str:
        span = max(1, len(self.losses) // 10)
        first, last = (sum(part) / len(part) for part in (self.losses[:span], self.losses[-span:]))
        said = f"fine-tuned {self.steps} steps in {self.seconds:.0f} s: loss {first:.4f} → {last:.4f}"
        if self.skipped:
            said = f"{said}, {self.skipped} tries skipped that were not finite"
        if self.held_before is None:
            return said
        if self.slowed < 1:
            said = f"{said} (rates cut to {self.slowed:.2g} of what was asked for)"
        if not self.best_step:
            return f"{said}; on held-back batches it got worse, so the model is as it was: try smaller learning rates"
        kept = f"kept the weights of step {self.best_step}"
        return f"{said}; on held-back batches {self.held_before:.4f} → {self.held_after:.4f}, {kept}"


@torch.inference_mode(False)
def finetune(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    teacher: nn.Module | None = None,
    loss: TaskLoss | None = None,
    steps: int = 200,
    lr: float = 5e-5,
    mechanism_lr: float = 5e-3,
    weight_decay: float = 0.0,
    warmup: float = 0.1,
    hidden_weight: float = 0.3,
    layer_weight: float = 0.0,
    freeze_embeddings: bool = True,
    exact_share: float = 1.0,
    seed: int = 0,
    holdout: float = 0.1,
    evaluate_every: int = 50,
    precision: Literal["fp32", "bf16"] = "fp32",
    skip_nonfinite: int = 0,
    checkpoint: str | Path | None = None,
    on_step: OnStep | None = None,
) -> FinetuningReport:
    """Train every weight of a converted model (or, on a task, of any model: the baseline by the same loop).

    Without `loss`, the model imitates its own outputs of before the conversion and needs no labels:
    `(1 − cos(pooled, pooled*)) + hidden_weight · ‖h − h*‖² / ‖h*‖²`, where pooled is the mean over real tokens and h
    the hidden states (or logits), plus `layer_weight` times the same relative error of what every converted layer
    receives, mean over the layers. With `loss`, that is minimised, plus the imitation if a `teacher` is given too.

    Args:
        batches: inputs, as in `calibrate`; a data loader or other iterable is read into a list, since steps visit
            them more than once.
        teacher: the model to imitate; by default this model as it is now with softmax back in place. For
            `layer_weight` its attention modules must have the names they have in `model`.
        loss: a task's loss, from the output and the batch, e.g. `lambda output, batch: output.loss`, or
            `lambda output, batch: cross_entropy(output, batch[1])` for pairs (inputs, labels).
        lr, mechanism_lr, weight_decay: of AdamW for the host's weights and for the mechanisms; a cosine for both.
        warmup: the share of the steps in which the rates rise. Adam's first steps move every weight by the whole rate
            in the direction of a few batches, which a calibrated model is too close to its teacher to bear.
        freeze_embeddings: leave embedding tables as they are (small data moves few of their rows, and far).
        exact_share: for LOT with its exact solver, the part of the steps, at the end, that solves exactly; the rest
            runs Sinkhorn sweeps, which is cheaper and worse.
        seed: of the order of batches and of dropout.
        holdout: without `loss`, the share of the batches kept back to measure on, if there are five or more; the
            weights that did best there (measured every `evaluate_every` steps) are the ones that stay, and those from
            before if none did better. Where the model gets worse than it was by a tenth, it goes back to the best
            weights and on at a third of the rates: rates that are too high cost time and nothing else. Inputs within
            the window, which are read as before, judge nothing where no others are held back.
        precision: "bf16" runs model and teacher under autocast, which is faster where the machine multiplies bf16;
            weights and optimizer stay as they are.
        skip_nonfinite: how many steps in a row may have a loss or gradient that is not finite; they are tried again
            with the next batches. One more ends the run, with the best weights in place.
        checkpoint, on_step: as in `calibrate`; so are interrupts and the training of parameters in half precision. A
            checkpoint is written every 100 steps.
    """
    for name, share in (("holdout", holdout), ("warmup", warmup)):
        require_share(name, share)
    for name, count in (("steps", steps), ("evaluate_every", evaluate_every)):
        require_count(name, count)
    settings = LoopSettings(steps, warmup=round(warmup * steps), seed=seed)
    if precision not in ("fp32", "bf16"):
        raise ValueError(f'`precision`: expected "fp32" or "bf16", got {precision!r}.')
    require_count("skip_nonfinite", skip_nonfinite, least=0)
    for name, value in (("lr", lr), ("mechanism_lr", mechanism_lr), ("weight_decay", weight_decay)):
        require_positive(name, value, or_zero=True)
    if checkpoint is not None:
        check_writable(Path(checkpoint))
    require_batches(batches)
    batches = batches if isinstance(batches, Sequence) else list(batches)
    if not batches:
        raise ValueError("`batches`: expected at least one batch of model inputs, got none.")
    require_learning(model)
    require_unfolded(model, "fine-tune")
    if loss is None:
        require_converted(model)
        teacher = softmax_copy(model) if teacher is None else teacher
    start = time.perf_counter()
    pool, held = apart(len(batches), holdout if loss is None else 0.0)
    with transporting(model), _trainable(model, dropout=loss is not None, embeddings=not freeze_embeddings):
        solver = ExactShare([mechanism_of(module) for _, module in converted(model)], steps, exact_share)
        weights = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
        groups = _groups(model, lr, mechanism_lr, weight_decay)
        file, begun = None, None
        if checkpoint is not None:
            chosen: dict[str, Any] = {
                "lr": lr,
                "mechanism_lr": mechanism_lr,
                "weight_decay": weight_decay,
                "hidden_weight": hidden_weight,
                "layer_weight": layer_weight,
                "freeze_embeddings": freeze_embeddings,
                "exact_share": exact_share,
                "holdout": holdout,
                "evaluate_every": evaluate_every,
                "precision": precision,
                "labels": loss is not None,
                **dataclasses.asdict(settings),
            }
            taught = None if teacher is None else fingerprint(teacher.state_dict())
            described = identity("fine-tuning", model, chosen, weights, fingerprint(batches))
            file, begun = Checkpoint(checkpoint, {**described, "teacher": taught}), fingerprint(weights)
        updates = LocalUpdates(weights, groups, torch.optim.AdamW, clip=1.0, start=begun, buffers=model.buffers())
        loss_of = _Loss(model, teacher, loss, hidden_weight, layer_weight, precision)
        work = _Finetuning(loss_of, solver, [batches[index] for index in held], updates, steps, evaluate_every)
        stream = Shuffled([batches[index] for index in pool], seed)
        loop = Loop(settings, work, stream, updates, file, on_step, skip_nonfinite=skip_nonfinite)
        try:
            loop.run()
        finally:
            solver.restore()
            updates.go_back()
    seconds = time.perf_counter() - start
    return FinetuningReport(
        steps=loop.step,
        seconds=seconds,
        losses=tuple(loop.losses),
        best_step=work.best_step,
        held_before=work.held_before,
        held_after=work.held_after,
        slowed=updates.slowed,
        skipped=loop.skipped,
    )


def softmax_copy(model: nn.Module) -> nn.Module:
    """A frozen copy of a converted model with softmax attention in place of its mechanisms."""
    twin = copy.deepcopy(model).eval().requires_grad_(False)
    for _, module in require_converted(twin):
        mechanism = mechanism_of(module)
        setattr(module, MECHANISM, SoftmaxAttention(mechanism.head_dim, mechanism.num_heads))
    return twin


class _Loss:
    """The loss of a batch: the task's, the distance from the teacher, or both."""

    def __init__(
        self,
        model: nn.Module,
        teacher: nn.Module | None,
        task: TaskLoss | None,
        hidden_weight: float,
        layer_weight: float,
        precision: str,
    ) -> None:
        self.model, self.teacher, self.task = model, teacher, task
        self.half = precision == "bf16"
        self.hidden_weight, self.layer_weight = hidden_weight, layer_weight
        self.layers = [name for name, _ in converted(model)] if layer_weight else []
        if layer_weight and (teacher is None or not self.layers):
            raise ValueError("`layer_weight` needs a converted model and a teacher whose layers it can follow.")
        for name in self.layers:
            if teacher is not None and name not in dict(teacher.named_modules()):
                raise ValueError(
                    f"`layer_weight`: the teacher has no layer {name!r} to follow. Give it the model's own "
                    "architecture, or leave the layers out with `layer_weight=0`."
                )

    def __call__(self, batch: Batch) -> Tensor:
        if not self.half:
            return self._of(batch)
        with torch.autocast(next(self.model.parameters()).device.type, torch.bfloat16):
            return self._of(batch)

    def _of(self, batch: Batch) -> Tensor:
        require_finite(batch)
        target = None
        if self.teacher is not None:
            with torch.no_grad(), _received(self.teacher, self.layers) as theirs:
                target = main_tensor(call(self.teacher, batch))
        try:
            with _received(self.model, self.layers) as own:
                output = call(self.model, batch)
        except ValueError as error:
            if target is None or target.isfinite().all():
                raise
            raise ValueError(
                "a batch: its inputs are finite, but the teacher's output is not: look at its weights."
            ) from error
        parts: list[Tensor] = [] if self.task is None else [self.task(output, batch)]
        if target is not None:
            parts.append(_imitation(main_tensor(output), target, batch, self.hidden_weight))
            errors = [_relative_error(own[name], theirs[name], batch) for name in self.layers]
            if errors:
                parts.append(self.layer_weight * torch.stack(errors).mean())
        return torch.stack(parts).sum()


@contextmanager
def _received(model: nn.Module, layers: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """While inside, note the first tensor that each of these layers is called with."""
    seen: dict[str, Tensor] = {}

    def note(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen[name] = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))

    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, args, kwargs, name=name: note(name, args, kwargs), with_kwargs=True
        )
        for name in layers
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _imitation(hidden: Tensor, target: Tensor, batch: Batch, hidden_weight: float) -> Tensor:
    hidden, target = widened(hidden), widened(target)
    cosine = torch.cosine_similarity(pooled(hidden, batch), pooled(target, batch), dim=-1).mean()
    return 1 - cosine + hidden_weight * _relative_error(hidden, target, batch)


def _relative_error(hidden: Tensor, target: Tensor, batch: Batch) -> Tensor:
    """`‖h − h*‖² / ‖h*‖²` over real tokens."""
    hidden, target = widened(hidden), widened(target)
    mask = real_tokens(hidden, batch)
    real: Tensor | float = 1.0 if mask is None else mask
    return ((hidden - target) * real).square().sum() / (target * real).square().sum().clamp_min(1e-12)


@contextmanager
def _trainable(model: nn.Module, *, dropout: bool, embeddings: bool) -> Iterator[None]:
    """While inside, the model trains, with or without dropout and embedding tables; as before after."""
    modes = {module: module.training for module in model.modules()}
    tables = [] if embeddings else [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    frozen = [table for table in tables if table.requires_grad]
    model.train(dropout)
    for table in frozen:
        table.requires_grad_(False)
    try:
        yield
    finally:
        for table in frozen:
            table.requires_grad_(True)
        for module, training in modes.items():
            module.training = training


def _groups(model: nn.Module, lr: float, mechanism_lr: float, weight_decay: float) -> list[ParamGroup]:
    """The host's weights, and the mechanisms: these learn faster and do not decay."""
    own = {p for _, module in converted(model) for p in mechanism_of(module).parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p not in own], "lr": lr, "weight_decay": weight_decay},
        {"params": [p for p in trained if p in own], "lr": mechanism_lr, "weight_decay": 0.0},
    ]


_LOST = 1.1  # how much worse than at the start is too much
_SLOWER = 1 / 3


class _Finetuning:
    """The loop's view of fine-tuning: one loss, and the weights that did best on held-back batches so far."""

    def __init__(
        self, loss_of: _Loss, solver: ExactShare, held: Sequence[Batch], updates: LocalUpdates, steps: int,
        evaluate_every: int,
    ) -> None:  # fmt: skip
        self.loss_of, self.solver, self.held, self.updates = loss_of, solver, held, updates
        self.steps, self.evaluate_every = steps, evaluate_every
        self.best_step = 0
        self.held_before: float | None = None
        self.held_after: float | None = None

    def begin(self) -> None:
        if all(tells_nothing(self.loss_of.model, batch) for batch in reversed(self.held)):
            self.held = []  # whatever helps longer inputs looks like a loss on what was read as before
            return
        self.held_before = self._held_loss()
        if not math.isfinite(self.held_before):
            raise ValueError(
                f"The loss on held-back batches is {self.held_before} before the first step: look at the model's and "
                "the teacher's outputs for numbers that are not finite."
            )
        self._remember(0, self.held_before)

    def losses(self, batch: Batch, step: int) -> Iterator[Tensor]:
        self.solver.at(step)
        yield self.loss_of(batch)

    def after(self, step: int) -> bool:
        if step % self.evaluate_every == 0 or step == self.steps:
            self._judge(step)
        return False

    _STATE = ("best_step", "held_before", "held_after")

    def state_dict(self) -> dict[str, Any]:
        return {"slowed": self.updates.slowed, **{name: getattr(self, name) for name in self._STATE}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.updates.slowed = state["slowed"]
        for name in self._STATE:
            setattr(self, name, state[name])

    def _judge(self, step: int) -> None:
        if self.held_before is None or self.held_after is None:
            self.best_step = step
            return
        value = self._held_loss()
        if better(value, self.held_after, higher=False):
            self._remember(step, value)
        elif not value <= _LOST * self.held_before and step < self.steps:  # what is not a number is lost, too
            self.updates.slowed *= _SLOWER
            self.updates.restart()

    @torch.no_grad()
    def _held_loss(self) -> float:
        self.solver.restore()
        try:
            return sum(float(self.loss_of(batch)) for batch in self.held) / len(self.held)
        except NonFiniteError:  # a layer refuses what weights that went astray have made
            return math.nan

    def _remember(self, step: int, value: float) -> None:
        self.held_after, self.best_step = value, step
        self.updates.remember()
