"""A row of a vision table trained with one seed, by one process or by many, and what is kept of it.

Every cell leaves the weights it ended with in `runs/<cell>/best.pt`, from which figures are drawn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from lotformer.cli.terminal import Listener
from lotformer.conversion.measuring.couplings import couplings_watched
from lotformer.data.vision.transforms import evaluation_transform
from lotformer.training.run import BEST, LAST, train
from lotformer.vision.build import load_trained
from lotformer.vision.evaluation import Transformed, evaluation_loader
from lotformer.vision.settings import VisionSettings
from lotformer.vision.task import ImageSets, Vision, normalisation

from ..engine import Cells, Told

_TIMED = 64


@dataclass(frozen=True)
class Cell:
    """One row with one seed, evaluated after its last step.

    Attributes:
        residual: worst relative column error of its LOT layers on a batch of validation images; None without any.
        minutes: of training and its evaluation; None if the run was interrupted on the way.
        waiting, attention: shares of the last steps.
        forward_ms, backward_ms: of a training step on at most 64 images, best of several; None if it was not timed.
    """

    row: str
    seed: int
    top1: float
    top5: float
    residual: float | None
    parameters: int
    epochs: float
    steps: int
    minutes: float | None
    images_per_second: float
    waiting: float
    attention: float | None
    forward_ms: float | None
    backward_ms: float | None


def train_row(
    row: str,
    vision: VisionSettings,
    sets: Callable[[], ImageSets],
    listen: Listener,
    cells: Cells,
    *,
    timed: bool = True,
) -> None:
    """Train, evaluate, store. An interrupted run goes on from its checkpoint."""
    name = f"{row}-seed{vision.seed}"
    cells.begin(name)
    folder = cells.place("runs") / name
    resumed, images = (folder / LAST).exists(), sets()
    report = train(Vision(vision, images), folder, resume=True, listeners=[Told(f"{row}, seed {vision.seed}", listen)])
    assert images.train is not None
    epochs = vision.epochs if vision.epochs is not None else report.steps * vision.batch_size / len(images.train)
    cell = None
    if cells.first:
        model = load_trained(folder / BEST).model
        times = step_milliseconds(model, vision.size, min(vision.batch_size, _TIMED)) if timed else (None, None)
        cell = Cell(
            row=row,
            seed=vision.seed,
            top1=report.metrics["top1"],
            top5=report.metrics["top5"],
            residual=_residual(model, vision, images),
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            epochs=epochs,
            steps=report.steps,
            minutes=None if resumed else report.seconds / 60,
            images_per_second=report.samples_per_second,
            waiting=report.waiting,
            attention=report.attention,
            forward_ms=times[0],
            backward_ms=times[1],
        )
    cells.finish(name, cell, {"steps": report.steps, "epochs": epochs})


@torch.no_grad()
def _residual(model: nn.Module, vision: VisionSettings, images: ImageSets) -> float | None:
    assert images.val is not None
    shown = Transformed(images.val, evaluation_transform(vision.size, vision.crop, **normalisation(vision)))
    pixels, _ = next(iter(evaluation_loader(shown)))
    with couplings_watched(model.eval()) as residuals:
        model(pixels)
    return max(residuals.values(), default=None)


def step_milliseconds(
    model: nn.Module, size: tuple[int, int], batch_size: int, repeats: int = 5
) -> tuple[float, float]:
    """Forward and backward of a training step on random images, each the best of several."""
    pixels, labels = torch.randn(batch_size, 3, *size), torch.zeros(batch_size, dtype=torch.long)
    model.train()
    best = [float("inf"), float("inf")]
    for _ in range(repeats):
        start = time.perf_counter()
        loss = F.cross_entropy(model(pixels), labels)
        middle = time.perf_counter()
        loss.backward()
        best = [min(best[0], middle - start), min(best[1], time.perf_counter() - middle)]
        model.zero_grad()
    return 1e3 * best[0], 1e3 * best[1]
