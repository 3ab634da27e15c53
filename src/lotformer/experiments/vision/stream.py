"""Training batches: a pure function of the seed and the number of the batch, so that a run resumes anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from ...data.vision.sources import Images
from ...training.random_state import isolated, seed_everything, seed_from
from ...training.stream import permutation

Batch = tuple[Tensor, Tensor]
"""Images `(B, 3, H, W)` and labels `(B,)`, or after mixing shares of the classes `(B, classes)`."""

Mix = Callable[[Tensor, Tensor], Batch]
_Item = tuple[int, int]  # index of an image, seed of its augmentation


class Order:
    """Which images are in which batch, and the seeds of their augmentation.

    An epoch is `length // batch_size` batches in a new order. With `repeats`, an image comes that often in a row, each
    time differently augmented, and an epoch holds correspondingly fewer images (repeated augmentation, as in DeiT).
    Process `rank` of `world` gets every `world`-th image of a batch, so all together see the batch of one.
    """

    def __init__(
        self, length: int, batch_size: int, seed: int, *, repeats: int = 1, rank: int = 0, world: int = 1
    ) -> None:
        if batch_size > length:
            raise ValueError(f"a batch of {batch_size} is more than the {length} training images: lower --batch-size.")
        if batch_size % world:
            raise ValueError(f"a batch of {batch_size} cannot be shared evenly by {world} processes.")
        self.length, self.batch_size, self.seed, self.repeats = length, batch_size, seed, repeats
        self.rank, self.world = rank, world
        self.batches_per_epoch = length // batch_size
        self._epoch = lru_cache(maxsize=2)(self._indices)

    def batch(self, number: int) -> list[_Item]:
        epoch, position = divmod(number, self.batches_per_epoch)
        places = range(position * self.batch_size, (position + 1) * self.batch_size)[self.rank :: self.world]
        indices = self._epoch(epoch)
        return [(indices[place], seed_from(self.seed, epoch, place)) for place in places]

    def _indices(self, epoch: int) -> list[int]:
        indices = permutation(self.length, self.seed, epoch)
        return [index for index in indices for _ in range(self.repeats)][: self.length]


class ImageStream:
    """An endless stream of augmented, mixed batches (a `training.stream.Stream`).

    Args:
        mix: mixup and cutmix on a whole batch, drawing from numpy's global generator.
        workers: processes that load ahead; what they give does not depend on their number.

    Attributes:
        drawn: batches given so far. broken: indices of images that could not be decoded.
    """

    def __init__(
        self, images: Images, transform: Callable[..., Tensor], order: Order, mix: Mix | None, workers: int = 0
    ) -> None:
        self.images, self.transform, self.order, self.mix, self.workers = images, transform, order, mix, workers
        self.drawn = 0
        self.broken = set(images.broken)
        self._loader: Iterator[tuple[Tensor, Tensor, list[int]]] | None = None

    def next(self) -> Batch:
        if self._loader is None:
            self._loader = iter(
                DataLoader(
                    _Augmented(self.images, self.transform),
                    batch_sampler=_From(self.order, self.drawn),
                    num_workers=self.workers,
                    collate_fn=_collate,
                )
            )
        pixels, labels, broken = next(self._loader)
        self.broken.update(broken)
        number, self.drawn = self.drawn, self.drawn + 1
        if self.mix is None:
            return pixels, labels
        with isolated(seed_from(self.order.seed, number)):  # the same mixture on every process
            return self.mix(pixels, labels)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.drawn, self._loader = state["drawn"], None


class StreamedImages:
    """An endless stream over a source with an order of its own. It resumes by reading on to where it was."""

    def __init__(self, data: IterableDataset[Any], batch_size: int, mix: Mix | None, seed: int, workers: int) -> None:
        self.data, self.batch_size, self.mix, self.seed, self.workers = data, batch_size, mix, seed, workers
        self.drawn = 0
        self.broken: set[int] = set()  # the reader skips what it cannot decode
        self._batches = self._endless()

    def next(self) -> Batch:
        with isolated(seed_from(self.seed, self.drawn)):
            pixels, labels = next(self._batches)
            self.drawn += 1
            return (pixels, labels) if self.mix is None else self.mix(pixels, labels)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.drawn, self._batches = 0, self._endless()
        while self.drawn < state["drawn"]:
            self.next()

    def _endless(self) -> Iterator[Batch]:
        while True:
            before = self.drawn
            yield from DataLoader(self.data, self.batch_size, num_workers=self.workers, drop_last=True)
            if self.drawn == before:
                raise ValueError(f"the source holds less than one batch of {self.batch_size} images.")


class _Augmented(Dataset[Any]):
    def __init__(self, images: Images, transform: Callable[..., Tensor]) -> None:
        self.images, self.transform = images, transform

    def __getitems__(self, items: Sequence[_Item]) -> list[tuple[Tensor, int, list[int]]]:
        """A whole batch, so that the caller's generators are put aside once."""
        known = set(self.images.broken)
        made: list[tuple[Tensor, int, list[int]]] = []
        with isolated(0):
            for index, seed in items:
                image, label = self.images[index]
                seed_everything(seed)
                made.append((self.transform(image), label, []))
        made[0][2].extend(self.images.broken - known)
        return made


class _From(Sampler[list[_Item]]):
    def __init__(self, order: Order, start: int) -> None:
        self.order, self.start = order, start

    def __iter__(self) -> Iterator[list[_Item]]:
        number = self.start
        while True:
            yield self.order.batch(number)
            number += 1


def _collate(samples: list[tuple[Tensor, int, list[int]]]) -> tuple[Tensor, Tensor, list[int]]:
    pixels, labels, broken = zip(*samples, strict=True)
    return torch.stack(pixels), torch.tensor(labels), broken[0]
