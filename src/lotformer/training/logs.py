"""Logs of a run, written to files; screens are elsewhere."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..files import write_text
from ..reading import decoded_lines, decoding, read_bytes


@dataclass(frozen=True)
class Progress:
    """The state of a run after a step.

    Attributes:
        loss: of this step. rate: the learning rate as a factor of its peak.
        samples_per_second, seconds_left: at the pace of the last steps.
        waiting: share of the last steps that was spent waiting for data. attention: share of the last timed step that
            attention took, forward and backward; None before the first one. The rest is neither.
        skipped: updates that were not finite, and not applied, since the run began.
    """

    step: int
    steps: int
    loss: float
    rate: float
    samples_per_second: float
    seconds_left: float
    waiting: float
    attention: float | None
    skipped: int = 0

    @property
    def rest(self) -> float | None:
        return None if self.attention is None else max(0.0, 1 - self.waiting - self.attention)


class Listener(Protocol):
    """Hears of a run on its first process."""

    def started(self, step: int, steps: int) -> None:
        """The run begins, or resumes, after `step` of `steps` steps."""

    def stepped(self, progress: Progress) -> None: ...

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def ended(self) -> None:
        """The run is over, whatever ended it."""


class JsonLines:
    """A file with one JSON object per line: `{"step": 10, "loss": …}`. Every step is in it at most once.

    A resumed run drops the lines after the checkpoint, which it is about to write again, and a last one without its
    end, which a kill has cut off.
    """

    def __init__(self, path: Path, every: int) -> None:
        self.path, self.every = path, every

    def started(self, step: int, steps: int) -> None:
        kept = self._until(step) if step and self.path.exists() else []
        write_text("".join(f"{line}\n" for line in kept), self.path)

    def stepped(self, progress: Progress) -> None:
        if progress.step % self.every == 0 or progress.step == progress.steps:
            self._write({**dataclasses.asdict(progress), "rest": progress.rest})

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write({"step": step, "evaluation": dict(metrics)})

    def ended(self) -> None:
        pass

    def _until(self, step: int) -> list[str]:
        """The lines up to a step.

        Raises:
            ValueError: a whole line is not one of a log, with its number.
        """
        whole = read_bytes(self.path).rpartition(b"\n")[0]
        kept = []
        for number, line in enumerate(decoded_lines(whole, str(self.path)) if whole else (), 1):
            where = f"{self.path}, line {number}"
            with decoding(where, "a line of a run's log (delete it, or move the file away)"):
                if json.loads(line)["step"] <= step:
                    kept.append(line)
        return kept

    def _write(self, line: Mapping[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(_written(line)) + "\n")


def _written(value: Any) -> Any:
    """The value with null for numbers that are not finite, which JSON does not have."""
    if isinstance(value, Mapping):
        return {name: _written(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoard:
    """Event files for TensorBoard in a folder."""

    def __init__(self, folder: Path, every: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("logs for TensorBoard need it: pip install 'lotformer[train]'.") from error
        self._open = lambda step: SummaryWriter(str(folder), purge_step=step + 1)
        self._writer: Any = None
        self.every = every

    def started(self, step: int, steps: int) -> None:
        self._writer = self._open(step)

    def stepped(self, progress: Progress) -> None:
        if progress.step % self.every == 0 or progress.step == progress.steps:
            for name in ("loss", "rate", "samples_per_second", "waiting", "attention", "rest", "skipped"):
                value = getattr(progress, name)
                if value is not None:
                    self._writer.add_scalar(f"train/{name}", value, progress.step)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(f"evaluation/{name}", value, step)

    def ended(self) -> None:
        if self._writer is not None:
            self._writer.close()
