"""The loop: steps, schedule, accumulation, checkpoints, interrupts. Calibration, fine-tuning and training share it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from ..nn.checks import require_count
from . import random_state
from .checkpoints import Checkpoint
from .finite import NonFiniteError, numbers, require_finite
from .interrupts import Interrupts
from .schedules import SCHEDULES
from .stream import Stream
from .teams import Alone, Team
from .updates import Updates

OnStep = Callable[[int, int, float], None]
"""Called after every step with (steps taken, steps in all, loss)."""


@dataclass(frozen=True)
class LoopSettings:
    """The length of a run and its learning-rate schedule.

    Attributes:
        steps: updates in all. accumulate: batches per update.
        schedule: "cosine", "one-cycle" or "inverse-sqrt". warmup: steps of its rise. final: the factor it ends at.
        save_every: steps between two checkpoints; the end and an interrupt write one too.
        seed: of dropout and everything else that draws from the global generators.
    """

    steps: int
    accumulate: int = 1
    schedule: str = "cosine"
    warmup: int = 0
    final: float = 0.0
    save_every: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "accumulate", "save_every"):
            require_count(name, getattr(self, name))
        require_count("warmup", self.warmup, least=0)
        if self.schedule not in SCHEDULES:
            known = ", ".join(map(repr, SCHEDULES))
            raise ValueError(f"schedule must be one of {known}, got {self.schedule!r}.")

    def factor(self, step: int) -> float:
        """The learning rate of a step, counted from 0, as a factor of its peak."""
        return SCHEDULES[self.schedule](step, self.steps, self.warmup, self.final)


class Work(Protocol):
    """One use of the loop: what a step computes, and what else must survive an interruption."""

    def begin(self) -> None:
        """Called once when a run begins, not when it resumes."""

    def losses(self, batch: Any, step: int) -> Iterable[Tensor]:
        """The scalar losses of a batch. Each is differentiated before the next is asked for; their sum is reported."""

    def after(self, step: int) -> bool:
        """Called when `step` steps are done: measure, log. True ends the run early."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Loop:
    """A run of `settings.steps` steps that may be cut short anywhere and ends as if it had not been.

    Every step is a function of the state (weights, optimizer, position in the data, random generators), and the state
    is what a checkpoint holds. SIGINT and SIGTERM let the step finish, save and stop; after anything harsher, the steps
    since the last checkpoint are taken again. The caller's random generators are left as they were.

    A step whose loss or gradient is not finite, on whichever process, is taken on none: it ends the run, or is tried
    again with the next batches where `skip_nonfinite` allows so many in a row (None: it is nothing to be chosen).

    Attributes:
        step: steps taken. losses: one number per step. ended_early: whether `work` ended the run.
        skipped: tries that were not finite.
        step_seconds, waiting_seconds: how long the last step took, and how much of that it waited for data.
    """

    def __init__(
        self,
        settings: LoopSettings,
        work: Work,
        stream: Stream,
        updates: Updates,
        checkpoint: Checkpoint | None = None,
        on_step: OnStep | None = None,
        team: Team | None = None,
        skip_nonfinite: int | None = None,
    ) -> None:
        self.team, self.skip_nonfinite = team or Alone(), skip_nonfinite
        self.settings, self.work, self.stream, self.updates = settings, work, stream, updates
        self.checkpoint, self.on_step = checkpoint, on_step
        self.step = self.skipped = 0
        self.losses: list[float] = []
        self.ended_early = False
        self.step_seconds = self.waiting_seconds = 0.0

    def run(self) -> None:
        """Resume if there is a checkpoint, go on to the end.

        Raises:
            KeyboardInterrupt, SystemExit: on SIGINT and SIGTERM, once the state is saved.
            NonFiniteError: a step was not finite; nothing of it was applied or saved.
        """
        interrupts = Interrupts()
        with random_state.isolated(self.settings.seed), interrupts:
            if not self._resumed():
                self.work.begin()
                self._save()  # a folder with anything of a run has its checkpoint
            asked_to_stop = 0
            while not self.ended and not asked_to_stop:
                self._advance_or_explain()
                # all processes must stop at the same step, whichever of them was asked
                asked_to_stop = int(max(row[0] for row in self.team.gather_numbers([interrupts.received or 0])))
                if self.ended or asked_to_stop or self.step % self.settings.save_every == 0:
                    self._save()
            interrupts.received = interrupts.received or asked_to_stop or None
        interrupts.deliver()

    @property
    def ended(self) -> bool:
        return self.ended_early or self.step >= self.settings.steps

    def state_dict(self) -> dict[str, Any]:
        own = {"stream": self.stream.state_dict(), "random": random_state.capture()}
        return {
            "step": self.step,
            "skipped": self.skipped,
            "losses": self.losses,
            "ended_early": self.ended_early,
            "work": self.work.state_dict(),
            "updates": self.updates.state_dict(),
            "processes": self.team.gather(own),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.work.load_state_dict(state["work"])
        self.updates.load_state_dict(state["updates"])
        self.step, self.losses, self.ended_early = state["step"], state["losses"], state["ended_early"]
        self.skipped = state["skipped"]
        processes, index = state["processes"], self.team.process.index
        if len(processes) == self.team.process.count:
            random_state.restore(processes[index]["random"])
        else:  # the data go on where they were; dropout cannot
            random_state.seed_everything(random_state.seed_from(self.settings.seed, self.step, index))
        self.stream.load_state_dict(processes[index % len(processes)]["stream"])

    def _advance_or_explain(self) -> None:
        """A step; what a model makes of weights that are not finite is not blamed on its inputs."""
        try:
            self._advance()
        except NonFiniteError:
            raise
        except Exception as error:
            try:
                require_finite(self.updates.not_finite(), self.step)
            except NonFiniteError as cause:
                raise cause from error
            raise

    def _advance(self) -> None:
        start, self.waiting_seconds = time.perf_counter(), 0.0
        in_a_row, (problem, loss) = 0, self._tried()
        while problem:
            self.updates.drop()
            in_a_row += 1
            if in_a_row > (self.skip_nonfinite or 0):
                raise NonFiniteError(self._stopped(problem, in_a_row))
            self.skipped += 1
            problem, loss = self._tried()
        self.updates.apply(self.settings.factor(self.step))
        self.step += 1
        self.losses.append(loss)
        self.step_seconds = time.perf_counter() - start
        if self.on_step is not None:
            self.on_step(self.step, self.settings.steps, self.losses[-1])
        self.ended_early = self.work.after(self.step)

    def _tried(self) -> tuple[str, float]:
        """Collect the gradient of the next batches: what is not finite, if anything, and the mean loss of processes."""
        try:
            rows = self._collected()
        except NonFiniteError as error:  # layers may refuse what other layers make of it
            problem = f"numbers in the model are not finite ({str(error).rstrip('.')})"
            if self.team.process.count > 1:  # the others wait for this one's gradient
                raise NonFiniteError(self._stopped(problem, 1)) from error
            return problem, math.nan
        return self._problem(rows), sum(loss for loss, _ in rows) / len(rows)

    def _collected(self) -> list[list[float]]:
        """Losses and gradients of the next batches: the sum and the norm on every process."""
        count = self.settings.accumulate
        weights: list[float] = []
        losses: list[Tensor] = []
        for index in range(count):
            asked = time.perf_counter()
            batch = self.stream.next()
            self.waiting_seconds += time.perf_counter() - asked
            weight = self.stream.share / count
            with self.updates.collecting(last=index == count - 1):
                for loss in self.work.losses(batch, self.step):
                    self.updates.backward(loss if weight == 1 else weight * loss)
                    weights.append(weight)
                    losses.append(loss.detach())
        *values, norm = numbers([*losses, self.updates.norm()])  # the one time that a step waits for the device
        total = sum(weight * value for weight, value in zip(weights, values, strict=True))
        return self.team.gather_numbers([total, norm])

    @staticmethod
    def _problem(rows: list[list[float]]) -> str:
        """Values that are not finite, and where; empty if all are. Every process sees the same rows.

        Losses come first: the gradient that processes share is not finite if any of theirs is not.
        """
        for what, values in zip(("loss", "norm of the gradient"), zip(*rows, strict=True), strict=True):
            for index, value in enumerate(values):
                if not math.isfinite(value):
                    return f"the {what} is {value:g}" + (f" on process {index}" if len(rows) > 1 else "")
        return ""

    def _stopped(self, problem: str, in_a_row: int) -> str:
        place = ", ".join(f"{name} {value}" for name, value in self.stream.state_dict().items())
        repeated = f", as in {in_a_row - 1} tries before it" if in_a_row > 1 else ""
        skip = (
            ""
            if self.skip_nonfinite is None
            else f", or pass over more such batches in a row with skip_nonfinite={in_a_row}"
        )
        return (
            f"step {self.step + 1}: {problem}{repeated}. Nothing of it was applied or saved. Lower the learning rate, "
            f"clip the gradient, look at the last batch for numbers that are not finite (data at {place}){skip}."
        )

    def _resumed(self) -> bool:
        state = None if self.checkpoint is None else self.checkpoint.read()
        if self.checkpoint is None or state is None:
            return False
        self.checkpoint.refuse_if(self.updates.foreign(state["updates"]))
        self.load_state_dict(state)
        return True

    def _save(self) -> None:
        """Write the checkpoint on the first process; if that fails, fail on all of them."""
        found = self.team.gather(self.updates.not_finite())
        require_finite((name for names in found for name in names), self.step)
        if self.checkpoint is None:
            return
        state, error = self.state_dict(), None
        if self.team.process.index == 0:
            try:
                self.checkpoint.write(state)
            except OSError as failure:
                error = failure
        if error := self.team.gather(error)[0]:
            raise error
