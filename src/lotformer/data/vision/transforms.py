"""From an image to the tensor a model sees: timm's transforms, by the names of DeiT's recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Augmentation:
    """Augmentation of training images.

    Attributes:
        scale: range of the area of the random crop. flip: probability of mirroring. color_jitter: its strength.
        randaugment: timm's description, e.g. "rand-m9-mstd0.5-inc1"; it takes the place of the colour jitter.
        erasing: probability of erasing a rectangle with noise.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    flip: float = 0.5
    color_jitter: float = 0.0
    randaugment: str = ""
    erasing: float = 0.0


def training_transform(size: tuple[int, int], augmentation: Augmentation, **model: Any) -> Callable[..., Tensor]:
    """`model` holds what timm's data config says of the model: interpolation, mean, std."""
    from timm.data import create_transform

    return create_transform(
        (3, *size),
        is_training=True,
        scale=augmentation.scale,
        hflip=augmentation.flip,
        color_jitter=augmentation.color_jitter or None,  # type: ignore[arg-type]  # timm takes None for no jitter
        auto_augment=augmentation.randaugment or None,
        re_prob=augmentation.erasing,
        re_mode="pixel",
        **model,
    )


def evaluation_transform(size: tuple[int, int], crop: float, **model: Any) -> Callable[..., Tensor]:
    """The whole image resized to `size / crop`, and its centre."""
    from timm.data import create_transform

    return create_transform((3, *size), is_training=False, crop_pct=crop, **model)
