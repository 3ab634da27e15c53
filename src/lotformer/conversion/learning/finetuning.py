"""`finetune`: let all weights adapt to the new attention, without labels or on a task."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...attention.softmax import SoftmaxAttention
from ...data.batches import Batch, call, main_tensor, pooled, real_tokens
from ...training.precision import Masters, widened
from ..hosts.sites import MECHANISM, converted, mechanism_of, require_converted
from .exact_share import ExactShare

TaskLoss = Callable[[Any, Batch], Tensor]
"""Maps a model's output and the batch it came from to a scalar loss."""


@dataclass(frozen=True)
class FinetuningReport:
    """What fine-tuning did: the loss at every step, and how long it took."""

    steps: int
    seconds: float
    losses: tuple[float, ...]

    def __str__(self) -> str:
        span = max(1, len(self.losses) // 10)
        first, last = (sum(part) / len(part) for part in (self.losses[:span], self.losses[-span:]))
        return f"fine-tuned {self.steps} steps in {self.seconds:.0f} s: loss {first:.4f} → {last:.4f}"


def finetune(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    teacher: nn.Module | None = None,
    loss: TaskLoss | None = None,
    steps: int = 200,
    lr: float = 5e-5,
    mechanism_lr: float = 5e-3,
    weight_decay: float = 0.0,
    hidden_weight: float = 0.3,
    layer_weight: float = 0.0,
    freeze_embeddings: bool = True,
    exact_share: float = 1.0,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    on_step: Callable[[int, int, float], None] | None = None,
) -> FinetuningReport:
    """Train every weight of a converted model (or, on a task, of any model: the baseline by the same loop).

    Without `loss`, the model imitates its own outputs of before the conversion and needs no labels:
    `(1 − cos(pooled, pooled*)) + hidden_weight · ‖h − h*‖² / ‖h*‖²`, where pooled is the mean over real tokens and h
    the hidden states (or logits), plus `layer_weight` times the same relative error of what every converted layer
    receives, mean over the layers. With `loss`, that is minimised, plus the imitation if a `teacher` is given too.

    Args:
        batches: inputs, as in `calibrate`; a list, since steps visit them more than once.
        teacher: the model to imitate; by default this model as it is now with softmax back in place. For
            `layer_weight` its attention modules must have the names they have in `model`.
        loss: a task's loss, from the output and the batch, e.g. `lambda output, batch: output.loss`.
        lr, mechanism_lr, weight_decay: of AdamW for the host's weights and for the mechanisms; a cosine for both.
        freeze_embeddings: leave embedding tables as they are (small data moves few of their rows, and far).
        exact_share: for LOT with its exact solver, the part of the steps, at the end, that solves exactly; the rest
            runs Sinkhorn sweeps, which is cheaper and worse.
        checkpoint, on_step, seed: as in `calibrate`; so is the training of parameters in half precision.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}.")
    if not batches:
        raise ValueError("`batches`: expected at least one batch of model inputs, got none.")
    if loss is None:
        require_converted(model)
        teacher = softmax_copy(model) if teacher is None else teacher
    start = time.perf_counter()
    loss_of = _Loss(model, teacher, loss, hidden_weight, layer_weight)
    modes = {module: module.training for module in model.modules()}
    frozen = _freeze_embeddings(model) if freeze_embeddings else []
    run = _Run(model, batches, steps, lr, mechanism_lr, weight_decay, exact_share, seed)
    if checkpoint is not None and Path(checkpoint).exists():
        run.load(Path(checkpoint))
    model.train(loss is not None)  # imitation compares with a teacher that drops nothing
    try:
        while run.step < steps:
            value = run.advance(loss_of)
            if on_step is not None:
                on_step(run.step, steps, value)
            if checkpoint is not None and (run.step % 100 == 0 or run.step == steps):
                run.save(Path(checkpoint))
    except KeyboardInterrupt:
        if checkpoint is not None:
            run.save(Path(checkpoint))
        raise
    finally:
        run.solver.restore()
        for parameter in frozen:
            parameter.requires_grad_(True)
        for module, training in modes.items():
            module.training = training
    return FinetuningReport(run.step, time.perf_counter() - start, tuple(run.losses))


def softmax_copy(model: nn.Module) -> nn.Module:
    """A frozen copy of a converted model with softmax attention in place of its mechanisms."""
    twin = copy.deepcopy(model).eval().requires_grad_(False)
    for _, module in require_converted(twin):
        mechanism = mechanism_of(module)
        setattr(module, MECHANISM, SoftmaxAttention(mechanism.head_dim, mechanism.num_heads))
    return twin


class _Loss:
    """What a batch costs: the task's loss, the distance from the teacher, or both."""

    def __init__(
        self,
        model: nn.Module,
        teacher: nn.Module | None,
        task: TaskLoss | None,
        hidden_weight: float,
        layer_weight: float,
    ) -> None:
        self.model, self.teacher, self.task = model, teacher, task
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
        with _received(self.model, self.layers) as own:
            output = call(self.model, batch)
        parts: list[Tensor] = [] if self.task is None else [self.task(output, batch)]
        if self.teacher is not None:
            with torch.no_grad(), _received(self.teacher, self.layers) as theirs:
                target = main_tensor(call(self.teacher, batch))
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


def _freeze_embeddings(model: nn.Module) -> list[Tensor]:
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding) and m.weight.requires_grad]
    for table in tables:
        table.requires_grad_(False)
    return tables


class _Run:
    """The loop's state, which is what a checkpoint holds."""

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Batch],
        steps: int,
        lr: float,
        mechanism_lr: float,
        weight_decay: float,
        exact_share: float,
        seed: int,
    ) -> None:
        self.model, self.batches, self.steps = model, batches, steps
        mechanisms = [mechanism_of(module) for _, module in converted(model)]
        self.solver = ExactShare(mechanisms, steps, exact_share)
        own = {id(p) for mechanism in mechanisms for p in mechanism.parameters()}
        trained = [p for p in model.parameters() if p.requires_grad]
        self.masters = Masters(trained)
        host, new = ([p for p in trained if (id(p) in own) == is_new] for is_new in (False, True))
        groups: list[dict[str, Any]] = [
            {"params": self.masters.of(host), "lr": lr, "weight_decay": weight_decay},
            {"params": self.masters.of(new), "lr": mechanism_lr, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW([group for group in groups if group["params"]])
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.generator = torch.Generator().manual_seed(seed)
        self.order: list[int] = []
        self.step = 0
        self.losses: list[float] = []

    def advance(self, loss_of: Callable[[Batch], Tensor]) -> float:
        if not self.order:
            self.order = torch.randperm(len(self.batches), generator=self.generator).tolist()
        self.solver.at(self.step)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = 0.5 * rate * (1 + math.cos(math.pi * self.step / self.steps))
        value = loss_of(self.batches[self.order.pop()])
        self.optimizer.zero_grad()
        value.backward()
        self.masters.take_gradients()
        nn.utils.clip_grad_norm_([p for g in self.optimizer.param_groups for p in g["params"]], 1.0)
        self.optimizer.step()
        self.masters.publish()
        self.step += 1
        self.losses.append(float(value.detach()))
        return self.losses[-1]

    def save(self, path: Path) -> None:
        state = {
            "step": self.step,
            "order": self.order,
            "losses": self.losses,
            "model": self.model.state_dict(),
            "masters": self.masters.state(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "random": torch.get_rng_state(),
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        try:
            state = torch.load(path, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.masters.load(state.get("masters", []))
        except Exception as error:
            raise ValueError(
                f"{path} is not a checkpoint of this fine-tuning: {error}. Delete it to start over."
            ) from error
        self.step, self.order, self.losses = state["step"], state["order"], state["losses"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        torch.set_rng_state(state["random"])
