"""Evaluation of a trained model: accuracy, speed, robustness to missing patches, and residuals of its couplings."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ..conversion.measuring.couplings import couplings_watched
from ..data.vision.sources import Images

Progress = Callable[[int, int], None]
"""Called with the images seen and the images in all."""


@dataclass(frozen=True)
class Evaluation:
    """Accuracies are shares of the images.

    Attributes:
        images_per_second: of the model alone, without loading.
        dropped: top-1 accuracy when a share of the patches is blanked, by that share.
        residuals: worst relative error of the column sums of each LOT layer on the first batch, by its name; of an
            unbalanced one, how far its columns are from even.
    """

    top1: float
    top5: float
    images: int
    images_per_second: float
    dropped: dict[str, float] = field(default_factory=dict)
    residuals: dict[str, float] = field(default_factory=dict)

    @property
    def residual(self) -> float | None:
        """The worst of all layers; None without LOT layers."""
        return max(self.residuals.values(), default=None)


class Transformed(Dataset[Any]):
    """Images as a model sees them."""

    def __init__(self, images: Images, transform: Callable[..., Tensor]) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.images[index]
        return self.transform(image), label


def evaluation_loader(data: Dataset[Any], batch_size: int = 128, workers: int = 0) -> DataLoader[Any]:
    """All images in order."""
    return DataLoader(data, batch_size, num_workers=workers)


def count_right(logits: Tensor, labels: Tensor) -> tuple[int, int]:
    """The numbers of labels predicted first, and among the first five."""
    right = logits.topk(min(5, logits.shape[1]), 1).indices == labels[:, None]
    return int(right[:, 0].sum()), int(right.any(1).sum())


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: DataLoader[Any],
    *,
    drop: Sequence[float] = (),
    patch_size: int = 16,
    seed: int = 0,
    progress: Progress | None = None,
) -> Evaluation:
    """Measure a model on every batch. `drop` are shares of patches of `patch_size` pixels to blank.

    A blank patch has the mean colour of the training set: zero, as images are normalised. Which patches it hits is
    random but the same for every model.
    """
    was_training = model.training
    device = next(model.parameters()).device
    model.eval()
    right1 = right5 = seen = 0
    kept = dict.fromkeys(drop, 0)
    seconds, residuals = 0.0, dict[str, float]()
    generator = torch.Generator().manual_seed(seed)
    for pixels, labels in batches:
        pixels, labels = pixels.to(device), labels.to(device)
        if not seen:
            with couplings_watched(model) as residuals:
                model(pixels)  # also warms up
        start = time.perf_counter()
        logits = model(pixels)
        seconds += time.perf_counter() - start
        one, five = count_right(logits, labels)
        right1, right5 = right1 + one, right5 + five
        for share in drop:
            blank = blanked(pixels, share, patch_size, generator)
            kept[share] += int((model(blank).argmax(1) == labels).sum())
        seen += len(labels)
        if progress is not None:
            progress(seen, len(batches.dataset))  # type: ignore[arg-type]  # ours has a length
    model.train(was_training)
    return Evaluation(
        top1=right1 / seen,
        top5=right5 / seen,
        images=seen,
        images_per_second=seen / seconds,
        dropped={f"{share:g}": count / seen for share, count in kept.items()},
        residuals=dict(residuals),
    )


def blanked(pixels: Tensor, share: float, patch_size: int, generator: torch.Generator) -> Tensor:
    """Images `(B, C, H, W)` in which that share of their patches is zero, drawn anew for every image."""
    batch, _, height, width = pixels.shape
    rows, columns = -(-height // patch_size), -(-width // patch_size)
    count = round(share * rows * columns)
    ranks = torch.rand(batch, rows * columns, generator=generator).argsort(1).argsort(1)
    keep = (ranks >= count).view(batch, 1, rows, columns).to(pixels)
    return pixels * F.interpolate(keep, scale_factor=patch_size, mode="nearest")[..., :height, :width]
