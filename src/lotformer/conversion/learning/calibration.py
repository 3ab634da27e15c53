"""`calibrate`: teach the new mechanisms what the old attention did, layer by layer, all layers at once."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...attention import Attention
from ...data.batches import Batch, require_batches
from ...nn.checks import require_count, require_positive
from ...training.checkpoints import Checkpoint, check_writable
from ...training.fingerprints import Fingerprint
from ...training.finite import NonFiniteError, better
from ...training.loop import Loop, LoopSettings, OnStep
from ...training.stream import Shuffled
from ...training.updates import LocalUpdates
from ..hosts.sites import MECHANISM, mechanism_of, require_converted, require_unfolded, softmax_up_to, transporting
from ..measuring.forecast import Forecast, forecast
from .activations import Activations, OnBatch
from .exact_share import ExactShare
from .held_back import apart, require_learning, require_share
from .identity import identity
from .objectives import Objective, check_objective, loss, output_error

_NOTHING = "nothing to learn"
_FORECAST_BATCHES = 4  # each is run twice, the first one once more for every layer


@dataclass(frozen=True)
class CalibrationReport:
    """The outcome of calibration.

    Attributes:
        error_before, error_after: relative squared error of each layer's projected output on the held-back
            batches (on all batches if there are too few to hold any back), those that layers read as softmax does
            aside.
        losses: the objective, averaged over layers, at every step. best_step: whose parameters were kept.
        stopped: "finished", "no improvement", or "nothing to learn" from inputs within the window.
        forecast: what to expect of the whole model, from the held-back batches: errors of layers compound.
        longest: tokens of the longest input; what is said here does not hold for much longer ones.
        softmax_up_to: the length up to which the model reads by softmax. What is said here is of LOT, at any length.
    """

    objective: Objective
    steps: int
    best_step: int
    seconds: float
    stopped: str
    error_before: dict[str, float]
    error_after: dict[str, float]
    losses: tuple[float, ...]
    forecast: Forecast | None = None
    longest: int = 0
    softmax_up_to: int = 0

    @property
    def mean_error_before(self) -> float:
        return sum(self.error_before.values()) / len(self.error_before)

    @property
    def mean_error_after(self) -> float:
        return sum(self.error_after.values()) / len(self.error_after)

    def within(self, prefix: str) -> CalibrationReport:
        """The same with the names that layers have in a model around this one, such as "model.encoder."."""
        if self.forecast is None or not prefix:
            return self
        without = {prefix + name: cosine for name, cosine in self.forecast.without.items()}
        return dataclasses.replace(self, forecast=dataclasses.replace(self.forecast, without=without))

    def __str__(self) -> str:
        if self.stopped == _NOTHING:
            return (
                f"there was {_NOTHING}: the inputs that were drawn, of at most {self.longest} tokens, are read as "
                "before. If the model will read longer ones, calibrate on such texts."
            )
        short = "" if self.longest > self.softmax_up_to else (
            f"; the model reads inputs this short, of up to {self.softmax_up_to} tokens, by softmax, and what is said "
            "here is of LOT: calibrate on longer ones, if it will read such"
        )  # fmt: skip
        return (
            f"calibrated {len(self.error_after)} layers in {self.steps} steps, {self.seconds:.0f} s ({self.stopped}), "
            f"on inputs of up to {self.longest} tokens: mean relative output error {self.mean_error_before:.3f} → "
            f"{self.mean_error_after:.4f}" + ("" if self.forecast is None else f"; {self.forecast}") + short
        )


@torch.inference_mode(False)
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
    on_step: OnStep | None = None,
    on_batch: OnBatch | None = None,
) -> CalibrationReport:
    """Fit the mechanisms of a converted model to the softmax attention they replaced; nothing else is trained.

    The model runs once over the batches with softmax in place, every layer's queries, keys and values are cached, and
    all mechanisms are trained on them at once: no layer waits for another and the host model is never
    differentiated. A few thousand unlabelled inputs of the kind the model serves are plenty. Batches that no step
    would draw are not run: N steps cache N batches at most, and those that are kept back.

    Args:
        model: a converted model.
        batches: its inputs: mappings of keyword arguments (with padding masks if padded), tensors, or what a data
            loader yields: lists and tuples whose first item holds the inputs and whose others, labels, are ignored.
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
        checkpoint: a file to resume from if it exists, and to write every `evaluate_every` steps and when interrupted.
            That of another model, other batches or other settings is refused.
        on_step: called with (step, steps, loss). on_batch: called with (batches, batches in all) before that, while the
            model runs with softmax.

    Ctrl-C and SIGTERM let the step finish, save, and leave the model whole, as any error does: mechanisms in place,
    with the best parameters so far. A loss or gradient that is not finite is such an error, and never applied. A
    resumed run ends with the parameters, bit for bit, of one that was never interrupted. Parameters in half precision
    are trained through copies in fp32, so that small steps are not rounded away.
    """
    check_objective(objective)
    for name, value in (("evaluate_every", evaluate_every), ("patience", patience)):
        require_count(name, value)
    require_positive("lr", lr)
    for name, share in (("exact_share", exact_share), ("holdout", holdout)):
        require_share(name, share)
    settings = LoopSettings(steps, save_every=evaluate_every, seed=seed)
    if checkpoint is not None:
        check_writable(Path(checkpoint))
    mechanisms = {name: mechanism_of(module) for name, module in require_converted(model)}
    require_learning(model)
    require_unfolded(model, "calibrate")
    trained = {
        f"{layer}.{MECHANISM}.{name}": parameter
        for layer, mechanism in mechanisms.items()
        for name, parameter in mechanism.named_parameters()
        if parameter.requires_grad
    }
    if not trained:
        raise ValueError("the mechanisms of this model have no trainable parameters: there is nothing to calibrate.")
    start = time.perf_counter()
    require_batches(batches)
    given, data = list(batches), Fingerprint()
    if not given:
        raise ValueError("`batches`: expected at least one batch of model inputs, got none.")
    for batch in given:
        data.add(batch)
    pool, held = apart(len(given), holdout)
    held = held or pool  # too few to hold any back serve for both
    wanted = {*held, *_drawn(pool, seed, steps)}
    with (
        transporting(model),
        Activations(model, given, wanted, memory_limit=memory_limit, on_batch=on_batch) as cache,
        _training(mechanisms.values()),
    ):
        chosen = {"objective": objective, "lr": lr, "exact_share": exact_share, "holdout": holdout}
        chosen |= {"evaluate_every": evaluate_every, "patience": patience, **dataclasses.asdict(settings)}
        file = None
        if checkpoint is not None:
            file = Checkpoint(checkpoint, identity("calibration", model, chosen, trained, str(data), host=True))
        solver = ExactShare(mechanisms.values(), steps, exact_share)
        held = _judges(held, cache.telling)
        updates = LocalUpdates(trained, [{"params": list(trained.values()), "lr": lr}], torch.optim.Adam)
        work = _Calibration(cache, held, mechanisms, updates, solver, objective, steps, evaluate_every, patience)
        loop = Loop(settings, work, Shuffled(pool, seed), updates, file, on_step)
        try:
            if cache.telling:
                loop.run()
            else:
                work.begin()
        finally:
            solver.restore()
            updates.go_back()
        longest, idle = cache.longest, not cache.telling
    expected = forecast(model, [given[index] for index in _spread(held, _FORECAST_BATCHES)])
    return CalibrationReport(
        objective=objective,
        steps=loop.step,
        best_step=work.best_step,
        seconds=time.perf_counter() - start,
        stopped=_NOTHING if idle else "finished" if loop.step >= steps else "no improvement",
        error_before=work.first_errors,
        error_after=work.best_errors,
        losses=tuple(loop.losses),
        forecast=expected,
        longest=longest,
        softmax_up_to=softmax_up_to(model),
    )


class _Calibration:
    """The loop's view of calibration: every layer's objective, and the best parameters so far."""

    def __init__(
        self,
        cache: Activations,
        held: Sequence[int],
        mechanisms: dict[str, Attention],
        updates: LocalUpdates,
        solver: ExactShare,
        objective: Objective,
        steps: int,
        evaluate_every: int,
        patience: int,
    ) -> None:
        self.cache, self.held, self.mechanisms, self.updates, self.solver = cache, held, mechanisms, updates, solver
        self.objective, self.steps, self.evaluate_every, self.patience = objective, steps, evaluate_every, patience
        self.first_errors: dict[str, float] = {}
        self.best_errors: dict[str, float] = {}
        self.best_step = 0
        self.bad_measurements = 0

    def begin(self) -> None:
        self._measure(0)

    def losses(self, batch: int, step: int) -> Iterator[Tensor]:
        """The mean over layers, a layer at a time: their gradients do not meet."""
        self.solver.at(step)
        seen = self.cache[batch]
        for name, mechanism in self.mechanisms.items():
            value = loss(mechanism, seen[name], self.cache.projections[name], self.objective)
            yield value / len(self.mechanisms)

    def after(self, step: int) -> bool:
        # what sweeps have learned says little about the exact couplings before those had their turn
        due = step % self.evaluate_every == 0 and self.solver.reached(step)
        if due or step == self.steps:
            self._measure(step)
        return self.bad_measurements >= self.patience

    _STATE = ("first_errors", "best_errors", "best_step", "bad_measurements")

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self._STATE:
            setattr(self, name, state[name])

    @torch.no_grad()
    def _measure(self, step: int) -> None:
        """Relative output error of each layer on the held-back batches, with the mechanisms as converted."""
        self.solver.restore()
        errors = dict.fromkeys(self.mechanisms, 0.0)
        for index in self.held:
            batch = self.cache[index]
            for name, mechanism in self.mechanisms.items():
                error = output_error(mechanism, batch[name], self.cache.projections[name])
                errors[name] += float(error) / len(self.held)
        total, best = sum(errors.values()), sum(self.best_errors.values()) if self.best_errors else None
        if not self.first_errors:
            if not math.isfinite(total):
                raise NonFiniteError(
                    f"The error on held-back batches is {total} before the first step: look at the model and at the "
                    "batches for numbers that are not finite."
                )
            self.first_errors = errors
        if better(total, best, higher=False):
            self.best_errors, self.best_step, self.bad_measurements = errors, step, 0
            self.updates.remember()
        else:
            self.bad_measurements += 1


def _judges(held: Sequence[int], telling: Sequence[int]) -> list[int]:
    """The batches to measure on: of those held back the telling ones, or as many others; any if none is telling."""
    return [index for index in held if index in telling] or _spread(telling, len(held)) or list(held)


def _spread(indices: Sequence[int], count: int) -> list[int]:
    """So many of these, evenly spaced; all if they are fewer."""
    count = min(count, len(indices))
    return [indices[int((i + 0.5) * len(indices) / count)] for i in range(count)]


def _drawn(pool: Sequence[int], seed: int, steps: int) -> list[int]:
    """The part of the pool that so many steps will see."""
    stream = Shuffled(pool, seed)
    return [stream.next() for _ in range(min(steps, len(pool)))]


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
