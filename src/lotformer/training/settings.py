"""The settings of a training run; a task adds its own by deriving from them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..settings import Settings, setting
from .loop import LoopSettings

_WITHOUT_EFFECT = ("workers", "save_every", "log_every", "profile_every", "skip_nonfinite")


@dataclass(frozen=True)
class TrainSettings(Settings):
    """Everything that every task can be told. A task derives its settings from these and may change defaults."""

    steps: int = setting(1000, "Updates in all, unless --epochs is given.", at_least=1)
    epochs: float | None = setting(None, "Passes over the data; wins over --steps.", at_least=0)
    batch_size: int = setting(128, "Samples per update, over all processes and accumulated batches.", at_least=1)
    accumulate: int = setting(1, "Batches that each update is split into, to save memory.", at_least=1)
    lr: float = setting(1e-3, "Peak learning rate.", at_least=0)
    schedule: Literal["cosine", "one-cycle", "inverse-sqrt"] = setting("cosine", "How the learning rate falls.")
    warmup_steps: int = setting(0, "Updates during which the learning rate rises.", at_least=0)
    warmup_epochs: float = setting(0.0, "The same in epochs; wins over --warmup-steps.", at_least=0)
    final_lr: float = setting(0.0, "Share of the learning rate that is left at the end.", at_least=0, at_most=1)
    weight_decay: float = setting(0.05, "Of AdamW; never applied to pivots, masses, ε, norms and biases.", at_least=0)
    betas: tuple[float, ...] = setting((0.9, 0.999), "Of AdamW.", at_least=0, at_most=1)
    adam_eps: float = setting(1e-8, "Of AdamW.", at_least=0)
    clip_norm: float | None = setting(1.0, "Largest norm of the gradient.", at_least=0)
    label_smoothing: float = setting(0.0, "Share of the target spread over all classes.", at_least=0, at_most=1)
    skip_nonfinite: int = setting(
        0,
        "Updates in a row whose loss or gradient may be not finite, to be tried again with other samples.",
        at_least=0,
    )
    ema: float | None = setting(None, "Decay of an average of the weights, which is then evaluated.", at_most=1)
    precision: Literal["fp32", "bf16"] = setting("fp32", "Of activations; weights stay in fp32.")
    sharded: bool = setting(False, "Split weights and optimizer over the processes (FSDP2).")
    seed: int = setting(0, "Of weights, order of the data, augmentation and dropout.", at_least=0)
    workers: int = setting(0, "Processes that load data, per training process.", at_least=0)
    evaluate_every: int | None = setting(None, "Updates between evaluations; only at the end if not given.", at_least=1)
    save_every: int = setting(200, "Updates between checkpoints.", at_least=1)
    log_every: int = setting(10, "Updates between lines of the log.", at_least=1)
    profile_every: int = setting(25, "Updates between those in which attention is timed.", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"batch_size must be a multiple of accumulate, got {self.batch_size} and {self.accumulate}."
            )
        if len(self.betas) != 2:
            raise ValueError(f"betas must be two numbers, got {list(self.betas)}.")

    @property
    def part_size(self) -> int:
        """Samples of one of the batches that make up an update, over all processes."""
        return self.batch_size // self.accumulate

    def loop(self, batches_per_epoch: int | None) -> LoopSettings:
        """The loop's schedule, given the number of batches (parts of an update) in an epoch.

        Raises:
            ValueError: a length is given in epochs, but the data have no end.
        """
        needs_epochs = self.epochs is not None or self.warmup_epochs > 0
        if needs_epochs and batches_per_epoch is None:
            raise ValueError("epochs and warmup_epochs need data with an end: give steps and warmup_steps instead.")
        updates = (batches_per_epoch or 0) / self.accumulate
        return LoopSettings(
            steps=self.steps if self.epochs is None else max(1, round(self.epochs * updates)),
            accumulate=self.accumulate,
            schedule=self.schedule,
            warmup=round(self.warmup_epochs * updates) if self.warmup_epochs else self.warmup_steps,
            final=self.final_lr,
            save_every=self.save_every,
            seed=self.seed,
        )

    def described(self) -> dict[str, Any]:
        """As plain data, without what changes no result: a run may be resumed with more workers."""
        plain = {name: _plain(value) for name, value in dataclasses.asdict(self).items()}
        return {name: value for name, value in plain.items() if name not in _WITHOUT_EFFECT}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
