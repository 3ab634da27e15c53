"""`calibrate`: teach the new mechanisms what the old attention did, layer by layer, all layers at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...attention import Attention
from ...data.batches import Batch
from ...training.precision import Masters
from ..hosts.sites import mechanism_of, require_converted
from .activations import Activations
from .exact_share import ExactShare
from .objectives import Objective, check_objective, loss, output_error


@dataclass(frozen=True)
class CalibrationReport:
    """What calibration achieved.

    Attributes:
        error_before, error_after: relative squared error of each layer's projected output on the held-back
            batches (on all batches if there are too few to hold any back).
        losses: the objective, averaged over layers, at every step. best_step: whose parameters were kept.
        stopped: "finished" or "no improvement".
    """

    objective: Objective
    steps: int
    best_step: int
    seconds: float
    stopped: str
    error_before: dict[str, float]
    error_after: dict[str, float]
    losses: tuple[float, ...]

    @property
    def mean_error_before(self) -> float:
        return sum(self.error_before.values()) / len(self.error_before)

    @property
    def mean_error_after(self) -> float:
        return sum(self.error_after.values()) / len(self.error_after)

    def __str__(self) -> str:
        return (
            f"calibrated {len(self.error_after)} layers in {self.steps} steps, {self.seconds:.0f} s ({self.stopped}): "
            f"mean relative output error {self.mean_error_before:.3f} → {self.mean_error_after:.4f}"
        )


def calibrate(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    objective: Objective = "output",
    steps: int = 250,
    lr: float = 2e-2,
    seed: int = 0,
    exact_share: float = 0.8,
    holdout: float = 0.1,
    evaluate_every: int = 50,
    patience: int = 4,
    memory_limit: int = 4 << 30,
    checkpoint: str | Path | None = None,
    on_step: Callable[[int, int, float], None] | None = None,
) -> CalibrationReport:
    """Fit the mechanisms of a converted model to the softmax attention they replaced; nothing else is trained.

    The model runs once over the batches with softmax in place, every layer's queries, keys and values are cached, and
    all mechanisms are trained on them at once: no layer waits for another and the host model is never
    differentiated. A few thousand unlabelled inputs of the kind the model serves are plenty.

    Args:
        model: a converted model. batches: its inputs (mappings, tuples or tensors), with padding masks if padded.
        objective: "output" is the relative error after the output projection, "attention" the row-wise cross-entropy
            between the matrices (which it forms), "both" the first plus a tenth of the second.
        steps, lr: Adam steps, one batch each, and the learning rate, which decays along a cosine.
        seed: of the order of batches. Two runs from equal parameters and equal batches end equal.
        exact_share: for LOT with its exact solver, the part of the steps that solves exactly. The steps before it use
            Sinkhorn sweeps: cheaper, and good for a start, but in the long run they learn to exploit that few sweeps
            do not converge, and the exact couplings get worse.
        holdout: share of the batches kept back to measure on; the parameters that did best there (measured every
            `evaluate_every` steps once solves are exact, with the mechanism as converted) are the ones that stay, and
            after `patience` measurements without a better one calibration stops.
        memory_limit: bytes of cached activations to hold in memory; the rest goes to a temporary folder.
        checkpoint: a file to resume from if it exists, and to write when measuring or when interrupted.
        on_step: called with (step, steps, loss).

    An interrupt leaves the model whole: mechanisms in place, with the parameters reached so far. Parameters in half
    precision are trained through copies in fp32, so that small steps are not rounded away.
    """
    check_objective(objective)
    for name, value in (("steps", steps), ("evaluate_every", evaluate_every), ("patience", patience)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    for name, share in (("exact_share", exact_share), ("holdout", holdout)):
        if not 0 <= share <= 1:
            raise ValueError(f"{name} is a share: expected a number from 0 to 1, got {share}.")
    found = require_converted(model)
    mechanisms = {name: mechanism_of(module) for name, module in found}
    parameters = [p for mechanism in mechanisms.values() for p in mechanism.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("the mechanisms of this model have no trainable parameters: there is nothing to calibrate.")
    start = time.perf_counter()
    with Activations(model, batches, memory_limit=memory_limit) as cache, _training(mechanisms.values()):
        trainer = _Trainer(cache, mechanisms, parameters, objective, steps, lr, seed, exact_share, holdout)
        if checkpoint is not None and Path(checkpoint).exists():
            trainer.load(Path(checkpoint))
        else:
            trainer.measure()
        try:
            while trainer.step < steps and trainer.bad_measurements < patience:
                objective_now = trainer.advance()
                if on_step is not None:
                    on_step(trainer.step, steps, objective_now)
                if trainer.step % evaluate_every == 0 or trainer.step == steps:
                    # what sweeps have learned says little about the exact couplings before those had their turn
                    if trainer.solver.reached(trainer.step) or trainer.step == steps:
                        trainer.measure()
                    if checkpoint is not None:
                        trainer.save(Path(checkpoint))
        except KeyboardInterrupt:
            if checkpoint is not None:
                trainer.save(Path(checkpoint))
            raise
        finally:
            trainer.solver.restore()
        trainer.keep_best()
        return CalibrationReport(
            objective=objective,
            steps=trainer.step,
            best_step=trainer.best_step,
            seconds=time.perf_counter() - start,
            stopped="finished" if trainer.step >= steps else "no improvement",
            error_before=trainer.first_errors,
            error_after=trainer.best_errors,
            losses=tuple(trainer.losses),
        )


class _Trainer:
    """The loop's state: everything that a checkpoint must hold is here."""

    def __init__(
        self,
        cache: Activations,
        mechanisms: dict[str, Attention],
        parameters: list[nn.Parameter],
        objective: Objective,
        steps: int,
        lr: float,
        seed: int,
        exact_share: float,
        holdout: float,
    ) -> None:
        self.cache, self.mechanisms, self.parameters, self.objective = cache, mechanisms, parameters, objective
        # evenly spaced: batches often come sorted by length
        held = min(round(holdout * len(cache)), len(cache) - 1) if len(cache) >= 5 else 0
        chosen = {int((i + 0.5) * len(cache) / held) for i in range(held)}
        self.pool = [i for i in range(len(cache)) if i not in chosen]
        self.held = sorted(chosen) or self.pool
        self.steps = steps
        self.solver = ExactShare(mechanisms.values(), steps, exact_share)
        self.masters = Masters(parameters)
        self.optimizer = torch.optim.Adam(self.masters.of(parameters), lr=lr)
        self.lr = lr
        self.generator = torch.Generator().manual_seed(seed)
        self.order: list[int] = []
        self.step = 0
        self.losses: list[float] = []
        self.first_errors: dict[str, float] = {}
        self.best_errors: dict[str, float] = {}
        self.best_step = 0
        self.best: list[Tensor] = []
        self.bad_measurements = 0

    def advance(self) -> float:
        """One Adam step on one batch; returns the objective averaged over layers."""
        if not self.order:
            self.order = torch.randperm(len(self.pool), generator=self.generator).tolist()
        batch = self.cache[self.pool[self.order.pop()]]
        self.solver.at(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.5 * self.lr * (1 + math.cos(math.pi * self.step / self.steps))
        self.optimizer.zero_grad()
        total = 0.0
        for name, mechanism in self.mechanisms.items():  # a layer at a time: gradients do not meet
            value = loss(mechanism, batch[name], self.cache.projections[name], self.objective)
            (value / len(self.mechanisms)).backward()
            total += float(value.detach())
        self.masters.take_gradients()
        self.optimizer.step()
        self.masters.publish()
        self.step += 1
        self.losses.append(total / len(self.mechanisms))
        return self.losses[-1]

    @torch.no_grad()
    def measure(self) -> None:
        """Relative output error of each layer on the held-back batches, with the mechanisms as converted."""
        self.solver.restore()
        errors = dict.fromkeys(self.mechanisms, 0.0)
        for index in self.held:
            batch = self.cache[index]
            for name, mechanism in self.mechanisms.items():
                error = output_error(mechanism, batch[name], self.cache.projections[name])
                errors[name] += float(error) / len(self.held)
        if not self.first_errors:
            self.first_errors = errors
        if not self.best_errors or sum(errors.values()) < sum(self.best_errors.values()):
            self.best_errors, self.best_step, self.bad_measurements = errors, self.step, 0
            self.best = [p.detach().clone() for p in self.parameters]
        else:
            self.bad_measurements += 1

    @torch.no_grad()
    def keep_best(self) -> None:
        for parameter, best in zip(self.parameters, self.best, strict=True):
            parameter.copy_(best)

    _STATE = ("step", "order", "losses", "first_errors", "best_errors", "best_step", "best", "bad_measurements")

    def save(self, path: Path) -> None:
        """Write the state; an interrupted write leaves the previous file alone."""
        state: dict[str, Any] = {name: getattr(self, name) for name in self._STATE}
        state |= {
            "parameters": [p.detach() for p in self.parameters],
            "masters": self.masters.state(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        try:
            state = torch.load(path, weights_only=True)
            for parameter, saved in zip(self.parameters, state["parameters"], strict=True):
                parameter.data.copy_(saved)
            self.masters.load(state.get("masters", []))
        except Exception as error:
            raise ValueError(
                f"{path} is not a checkpoint of this calibration: {error}. Delete it to start over."
            ) from error
        for name in self._STATE:
            setattr(self, name, state[name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])


@contextmanager
def _training(mechanisms: Iterable[Attention]) -> Iterator[None]:
    """Gradients on and dropout off while inside, as before after."""
    states = [(m, m.training) for mechanism in mechanisms for m in mechanism.modules()]
    for module, _ in states:
        module.training = False
    try:
        with torch.enable_grad():
            yield
    finally:
        for module, training in states:
            module.training = training
