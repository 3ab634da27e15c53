"""`train`: a task, from fresh weights to a folder with the best and the last ones."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import random_state
from .accelerated import AcceleratedTeam, AcceleratedUpdates, make_accelerator
from .checkpoints import Checkpoint, check_writable
from .decay import parameter_groups
from .fingerprints import shapes
from .finite import better, require_finite
from .locks import holding
from .logs import JsonLines, Listener, Progress, TensorBoard
from .loop import Loop
from .task import Task
from .teams import Process, Team
from .timing import AttentionClock

if TYPE_CHECKING:
    from accelerate import Accelerator

LAST, BEST, LOG = "last.pt", "best.pt", "log.jsonl"
"""Files in the folder of a run: the checkpoint to resume from, the weights that did best, one JSON object per line."""

_LAST_WORD = 5.0  # seconds
_DEAD_WORKER = "It was loading data; if memory ran out, use fewer workers. Resume to go on."


@dataclass(frozen=True)
class TrainingReport:
    """The outcome of a run.

    Attributes:
        losses: one per step. metrics: of the last evaluation. best: the best value of the task's metric, at best_step.
        seconds, samples_per_second: of this process's steps since it began or resumed.
        waiting, attention: shares of the time, as in `logs.Progress`. skipped: updates that were not finite.
    """

    steps: int
    losses: tuple[float, ...]
    metrics: dict[str, float]
    best: float | None
    best_step: int
    seconds: float
    samples_per_second: float
    waiting: float
    attention: float | None
    skipped: int = 0


def train(task: Task, out: Path, *, resume: bool = False, listeners: Sequence[Listener] = ()) -> TrainingReport:
    """Train a task; the same under `python`, `torchrun` and `accelerate launch`.

    `out` receives `last.pt` (the checkpoint), `best.pt` (weights and metrics of the best evaluation), `log.jsonl` and
    event files for TensorBoard. With `resume`, a run that was interrupted by anything goes on from its checkpoint and
    ends bit for bit as if it had not been; so it is safe to give it always.

    Raises:
        ValueError: `out` holds a run already and `resume` was not given, or holds another run.
        BlockingIOError: a run that goes on holds `out`.
        NonFiniteError: a loss, gradient or weight is not finite, and no more such steps are to be skipped. Nothing of
            it was applied or saved.
        OSError: a checkpoint cannot be written (the previous one is intact), or a worker that loads data died.
    """
    accelerator = make_accelerator()
    team = AcceleratedTeam(accelerator)
    with _folder(out, resume, team):
        return _train(task, out, accelerator, team, listeners)


def _train(
    task: Task, out: Path, accelerator: Accelerator, team: Team, listeners: Sequence[Listener]
) -> TrainingReport:
    settings = task.settings
    with random_state.isolated(settings.seed):
        model = task.build_model()
    stream = task.stream(team.process)
    belongs_to = {
        "kind": "training",
        "task": task.name,
        "settings": settings.described(),
        "parameters": shapes(model.state_dict()),
        "data": stream.described,
    }
    updates = AcceleratedUpdates(
        accelerator,
        model,
        partial(parameter_groups, weight_decay=settings.weight_decay),
        lambda groups: torch.optim.AdamW(
            groups, lr=settings.lr, betas=(settings.betas[0], settings.betas[1]), eps=settings.adam_eps
        ),
        clip=settings.clip_norm,
        ema=settings.ema,
        sharded=settings.sharded,
    )
    first = team.process.index == 0
    heard: list[Listener] = []
    if first:
        log, board = JsonLines(out / LOG, settings.log_every), TensorBoard(out / "tensorboard", settings.log_every)
        heard = [log, board, *listeners]
    chosen = settings.loop(stream.batches_per_epoch)
    if not first:  # dropout differs between processes
        chosen = dataclasses.replace(chosen, seed=random_state.seed_from(settings.seed, team.process.index))
    samples = chosen.accumulate * getattr(stream, "samples_per_batch", settings.part_size)
    work = _Training(task, updates, accelerator, team, chosen.steps, samples, heard, Checkpoint(out / BEST, belongs_to))
    loop = Loop(chosen, work, stream, updates, Checkpoint(out / LAST, belongs_to), None, team, settings.skip_nonfinite)
    work.follow(loop)
    start = time.perf_counter()
    try:
        loop.run()
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            if team.process.count > 1:  # another process may be gone: let the launcher see and name that one first
                time.sleep(_LAST_WORD)
            raise
        raise ChildProcessError(f"process {team.process.index}: {str(error).splitlines()[0]} {_DEAD_WORKER}") from error
    finally:
        stream.close()
        for listener in heard:
            listener.ended()
    return TrainingReport(
        steps=loop.step,
        losses=tuple(loop.losses),
        metrics=work.metrics,
        best=work.best,
        best_step=work.best_step,
        seconds=time.perf_counter() - start,
        samples_per_second=work.pace.samples_per_second,
        waiting=work.pace.waiting,
        attention=work.pace.attention,
        skipped=loop.skipped,
    )


@contextmanager
def _folder(out: Path, resume: bool, team: Team) -> Iterator[None]:
    """Make the folder, hold it, and leave a run that is in it alone unless it is to be resumed.

    The first process does so for all of them.
    """
    with ExitStack() as held:
        error = None
        if team.process.index == 0:
            try:
                out.mkdir(parents=True, exist_ok=True)
                check_writable(out / LAST)
                held.enter_context(holding(out))
                _refuse_to_overwrite(out, resume)
            except (OSError, ValueError) as failure:
                error = failure
        if error := team.gather(error)[0]:
            raise error
        yield


def _refuse_to_overwrite(out: Path, resume: bool) -> None:
    found = [name for name in (LAST, BEST, LOG) if (out / name).exists()]
    told = " and ".join(found)
    if found and not resume:
        raise ValueError(f"{out} holds a run already: resume it (--resume), or choose another folder. It has {told}.")
    if found and LAST not in found:
        raise ValueError(
            f"{out} holds {told} of a run, but not its {LAST}, from which it could be resumed: put that "
            "back, move the others away, or choose another folder."
        )


def _moved(batch: Any, device: torch.device) -> Any:
    from accelerate.utils import send_to_device

    return send_to_device(batch, device)


class _Pace:
    """Speed of the last steps, and the shares of their time."""

    _STEPS = 50

    def __init__(self, samples: float) -> None:
        self.samples = samples
        self.attention: float | None = None
        self._steps: deque[tuple[float, float]] = deque(maxlen=self._STEPS)

    def add(self, seconds: float, waiting: float, attention: float | None) -> None:
        self._steps.append((seconds, waiting))
        if attention is not None:
            self.attention = attention / seconds

    @property
    def seconds(self) -> float:
        """Per step."""
        return sum(seconds for seconds, _ in self._steps) / max(1, len(self._steps))

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds if self._steps else 0.0

    @property
    def waiting(self) -> float:
        return sum(waiting for _, waiting in self._steps) / sum(s for s, _ in self._steps) if self._steps else 0.0


class _Training:
    """The loop's view of a task: loss, evaluations, logs, and the best weights."""

    def __init__(
        self,
        task: Task,
        updates: AcceleratedUpdates,
        accelerator: Accelerator,
        team: Team,
        steps: int,
        samples: float,
        listeners: Sequence[Listener],
        best_file: Checkpoint,
    ) -> None:
        self.task, self.updates, self.accelerator, self.team = task, updates, accelerator, team
        self.steps, self.listeners, self.best_file = steps, listeners, best_file
        self.metrics: dict[str, float] = {}
        self.best: float | None = None
        self.best_step = 0
        self.pace = _Pace(samples)
        self._clock = AttentionClock(updates.bare)
        updates.model.train()

    def follow(self, loop: Loop) -> None:
        """Tell the listeners of every step that the loop takes."""
        every, first = self.task.settings.profile_every, True

        def on_step(step: int, steps: int, loss: float) -> None:
            nonlocal first
            if first:
                first = False
                for listener in self.listeners:
                    listener.started(step - 1, steps)
            timed = self._clock.take() if step % every == 0 else None
            self.pace.add(loop.step_seconds, loop.waiting_seconds, timed)
            progress = Progress(
                step=step,
                steps=steps,
                loss=loss,
                rate=loop.settings.factor(step - 1),
                samples_per_second=self.pace.samples_per_second,
                seconds_left=(steps - step) * self.pace.seconds,
                waiting=self.pace.waiting,
                attention=self.pace.attention,
                skipped=loop.skipped,
            )
            for listener in self.listeners:
                listener.stepped(progress)

        loop.on_step = on_step

    def begin(self) -> None:
        pass

    def losses(self, batch: Any, step: int) -> Iterator[Tensor]:
        timed = (step + 1) % self.task.settings.profile_every == 0
        with self._clock.watching() if timed else nullcontext():
            with self._autocast():
                loss = self.task.loss(self.updates.model, _moved(batch, self.accelerator.device))
            yield loss  # the loop differentiates it before it comes back

    def after(self, step: int) -> bool:
        every = self.task.settings.evaluate_every
        if step == self.steps or (every is not None and step % every == 0):
            self._evaluate(step)
        return False

    _STATE = ("metrics", "best", "best_step")

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self._STATE:
            setattr(self, name, state[name])

    def _autocast(self) -> AbstractContextManager[Any]:
        half = self.task.settings.precision == "bf16"
        return torch.autocast(self.accelerator.device.type, torch.bfloat16) if half else nullcontext()

    def _evaluate(self, step: int) -> None:
        found = self.team.gather(self.updates.not_finite())
        require_finite((name for names in found for name in names), step)
        self.metrics = self._measured(self.updates.evaluated)
        for listener in self.listeners:
            listener.evaluated(step, self.metrics)
        if self.task.metric not in self.metrics:
            known = ", ".join(self.metrics)
            raise ValueError(f"task {self.task.name!r} is judged by {self.task.metric!r}, but evaluates {known}.")
        value = self.metrics[self.task.metric]
        if better(value, self.best, higher=self.task.higher_is_better):
            self.best, self.best_step = value, step
            weights = self.updates.weights()
            if self.team.process.index == 0:
                self.best_file.write({"step": step, "metrics": self.metrics, "weights": weights})

    def _measured(self, model: nn.Module) -> dict[str, float]:
        # a sharded model can only run on all processes at once, so each of them sees everything
        process = Process() if self.task.settings.sharded else self.team.process
        modes = {module: module.training for module in model.modules()}
        model.eval()
        try:
            with torch.no_grad(), self._autocast(), random_state.isolated(self.task.settings.seed):
                shares = self.team.gather(dict(self.task.evaluate(model, process)))
        finally:
            for module, training in modes.items():
                module.training = training
        return {name: sum(s[name][0] for s in shares) / sum(s[name][1] for s in shares) for name in shares[0]}
