"""Learning without labels, as every experiment on converted checkpoints does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from lotformer import conversion
from lotformer.cli.terminal import Listener
from lotformer.data.batches import Batch


@dataclass(frozen=True)
class Learned:
    """`seconds` is None if the work was interrupted on the way. `errors` and `forecast` are those of calibration."""

    steps: int = 0
    seconds: float | None = None
    errors: dict[str, float] = field(default_factory=dict)
    forecast: float | None = None


def learn(
    stage: str,
    model: nn.Module,
    batches: Sequence[Batch],
    teacher: Callable[[], nn.Module],
    settings: Any,
    *,
    seed: int,
    checkpoint: Path,
    told: tuple[str, Listener],
    **finetuning: Any,
) -> Learned:
    """Calibrate the new parameters, or fine-tune all weights to imitate the teacher, from inputs alone.

    Interrupted work goes on from its checkpoint. How much is spent is said by `calibration_steps`, `finetune_steps`,
    `finetune_lr` and `finetune_layers` of the settings.
    """
    name, listen = told
    what = f"{name}: {'calibrating' if stage == 'calibrated' else 'fine-tuning without labels'}"
    shared: dict[str, Any] = {"seed": seed, "checkpoint": checkpoint}
    shared["on_step"] = lambda now, total, _: listen(what, now, total)
    resumed = checkpoint.exists()
    if stage == "calibrated":
        made = conversion.calibrate(model, batches, steps=settings.calibration_steps, **shared)
        forecast = None if made.forecast is None else made.forecast.cosine
        return Learned(made.steps, None if resumed else made.seconds, made.error_after, forecast)
    tuned = conversion.finetune(
        model,
        batches,
        teacher=teacher(),
        steps=settings.finetune_steps,
        lr=settings.finetune_lr,
        layer_weight=settings.finetune_layers,
        **shared,
        **finetuning,
    )
    return Learned(tuned.steps, None if resumed else tuned.seconds)
