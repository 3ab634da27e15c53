"""Training batches: augmented images in mixed batches, and sources that can only be streamed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..data.vision.sources import Images
from ..training import random_state
from ..training.loader import Batches, shuffled

Mix = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Mixup or cutmix: images and labels to mixed images and shares of the classes."""


@dataclass(frozen=True)
class ImageBatch:
    """Images `(B, 3, H, W)`, labels `(B,)` or shares of the classes `(B, C)`, and files found broken on the way."""

    pixels: Tensor
    targets: Tensor
    broken: tuple[int, ...] = ()

    def to(self, device: Any, **options: Any) -> ImageBatch:
        return ImageBatch(self.pixels.to(device, **options), self.targets.to(device, **options), self.broken)


class Augmented:
    """Images through a random transform, as a map-style data set: `(tensor, label, indices newly found broken)`."""

    def __init__(self, images: Images, transform: Callable[..., Tensor]) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int, set[int]]:
        known = set(self.images.broken)
        image, label = self.images[index]
        return self.transform(image), label, self.images.broken - known


class Mixed:
    """Collates samples of `Augmented`, and mixes them."""

    def __init__(self, mix: Mix | None) -> None:
        self.mix = mix

    def __call__(self, samples: list[tuple[Tensor, int, set[int]]]) -> ImageBatch:
        pixels, labels = torch.stack([x for x, _, _ in samples]), torch.tensor([label for _, label, _ in samples])
        broken = tuple(index for _, _, found in samples for index in found)
        if self.mix is None:
            return ImageBatch(pixels, labels, broken)
        return ImageBatch(*self.mix(pixels, labels), broken)


def repeated(length: int, size: int, seed: int, repeats: int) -> Batches:
    """Batches in which every image comes `repeats` times in a row: repeated augmentation, as DeiT has it.

    An epoch stays as long as the data, so it holds correspondingly fewer images.
    """
    once = shuffled(length, size, seed)
    if repeats == 1:
        return once

    def batches(epoch: int) -> list[list[int]]:
        order = [index for batch in once(epoch) for index in batch for _ in range(repeats)]
        return [order[start : start + size] for start in range(0, length - size + 1, size)]

    return batches


class StreamedImages:
    """A training stream over a source with an order of its own; timm's reader shares it among the processes.

    It resumes by reading on to where it was, and augments as it did only if `workers` is the same.
    """

    share = 1.0

    def __init__(self, data: Any, size: int, mix: Mix | None, *, seed: int, workers: int, described: str) -> None:
        self.data, self.size, self.mix, self.seed, self.workers = data, size, mix, seed, workers
        self.described = described
        self.batches_per_epoch: int | None = len(data) // size
        self._drawn = 0
        self._endless = self._batches()

    def next(self) -> ImageBatch:
        with random_state.isolated(random_state.seed_from(self.seed, self._drawn)):
            pixels, labels = next(self._endless)
            self._drawn += 1
            return ImageBatch(pixels, labels) if self.mix is None else ImageBatch(*self.mix(pixels, labels))

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._drawn, self._endless = 0, self._batches()
        while self._drawn < state["drawn"]:
            self.next()

    def close(self) -> None:
        self._endless.close()

    def _batches(self) -> Generator[tuple[Tensor, Tensor], None, None]:
        while True:
            before = self._drawn
            yield from DataLoader(self.data, self.size, num_workers=self.workers, drop_last=True)
            if self._drawn == before:
                raise ValueError(f"the source holds less than one batch of {self.size} images.")
