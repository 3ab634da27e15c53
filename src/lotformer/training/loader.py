"""Batches from a map-style data set, as a pure function of the seed and of how many were drawn.

Order and augmentation do not depend on workers, processes or accumulation: every sample is drawn with random generators
that are seeded from its place in the run. So a position in the data is two numbers, resuming costs nothing, and several
processes see together what one would have seen alone. (torchdata's StatefulDataLoader restores the order only: workers
start with other random numbers after a resume.)
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import active_children
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, default_collate

from . import random_state
from .random_state import seed_from
from .stream import permutation
from .teams import Process

Batches = Callable[[int], Sequence[Sequence[int]]]
"""Maps the number of an epoch to its batches, each the indices of the samples of all processes together."""


class MapStyle(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


def shuffled(length: int, size: int, seed: int) -> Batches:
    """Batches of `size` samples in a new order every epoch; what does not fill a batch waits for another epoch.

    Raises:
        ValueError: there are fewer samples than a batch needs.
    """
    if length < size:
        raise ValueError(f"a batch needs {size} samples and the data have {length}: choose a smaller batch_size.")

    def batches(epoch: int) -> list[list[int]]:
        order = permutation(length, seed, epoch)
        return [order[start : start + size] for start in range(0, length - size + 1, size)]

    return batches


class LoaderStream:
    """The training batches of one process, without end.

    Args:
        data: the samples. Their transforms may draw from the generators of torch, numpy and Python.
        batches: which samples make up the batches of an epoch, e.g. `shuffled(len(data), size, seed)`. Every process
            gets a contiguous part of each.
        collate: makes a batch of a list of samples; it may draw random numbers too (mixup).
        workers: processes that load; 0 loads where the model trains.
        described: what the data are, for the checkpoint to refuse others: a fingerprint of their contents, e.g.
            `fingerprints.fingerprint(tensors)`. Two sets with one description pass for each other.
    """

    def __init__(
        self,
        data: MapStyle,
        batches: Batches,
        *,
        seed: int,
        process: Process = Process(),  # noqa: B008  frozen
        collate: Callable[[list[Any]], Any] = default_collate,
        workers: int = 0,
        described: str,
    ) -> None:
        self.described = described
        first = batches(0)
        self.batches_per_epoch = len(first)
        self.samples_per_batch = sum(map(len, first)) / max(1, len(first))
        self.share = 1.0
        self._samples = _Samples(data, collate)
        self._batches, self._seed, self._process, self._workers = batches, seed, process, workers
        self._place = 0, 0
        self._running: Iterator[Any] | None = None
        self._helpers: list[BaseProcess] = []

    def next(self) -> Any:
        if self._running is None:
            others = active_children()
            self._running = iter(self._loader())
            self._helpers = [child for child in active_children() if child not in others]
        try:
            self._place, self.share, batch = next(self._running)
        except (OSError, EOFError, RuntimeError) as error:
            self._name_the_dead(error)
            raise
        return batch

    def state_dict(self) -> dict[str, Any]:
        epoch, position = self._place
        return {"epoch": epoch, "position": position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.close()
        self._place = state["epoch"], state["position"]

    def close(self) -> None:
        # with the last reference they end at once; the garbage collector, which closes their queues first, would wait
        # five seconds for each
        self._running, self._helpers = None, []

    def _name_the_dead(self, error: Exception) -> None:
        """Say in PyTorch's words that a worker has died, if one has.

        PyTorch itself may not have noticed yet: what it reports then is a connection that broke off within a batch.
        """
        dead = wait([helper.sentinel for helper in self._helpers], timeout=1)
        for helper in self._helpers:
            if helper.sentinel in dead:
                helper.join(timeout=1)  # it closes its files before its exit code can be read
                code = helper.exitcode or 0
                how = f"killed by signal: {signal.strsignal(-code)}" if code < 0 else f"gone with exit code {code}"
                raise RuntimeError(f"DataLoader worker (pid {helper.pid}) is {how}.") from error

    def _loader(self) -> DataLoader[Any]:
        return DataLoader(
            self._samples,  # type: ignore[arg-type]  # it is asked for batches only
            batch_size=None,
            sampler=_Parts(self._batches, self._seed, self._process, self._place),
            collate_fn=_as_it_is,
            num_workers=self._workers,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # a loader draws a seed when it starts: not from the model's generator
            worker_init_fn=_aloof if self._workers else None,
        )


def _aloof(worker: int) -> None:
    """Leave the process group: Ctrl-C must not end a worker before the step is done and saved."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the run's handler, inherited, only takes note
    if hasattr(os, "setpgid"):  # not on Windows
        os.setpgid(0, 0)


def _as_it_is(loaded: Any) -> Any:
    return loaded


_Place = tuple[int, int]  # epoch, and position in it


@dataclass(frozen=True)
class _Part:
    """One process's part of a batch: samples, a seed for each, one for their collation, and the state afterwards."""

    share: float
    indices: Sequence[int]
    seeds: Sequence[int]
    collation_seed: int
    next_place: _Place


class _Parts:
    """The parts of a process, from a place in the run to no end."""

    def __init__(self, batches: Batches, seed: int, process: Process, start: _Place) -> None:
        self.batches, self.seed, self.process, self.start = batches, seed, process, start

    def __iter__(self) -> Iterator[_Part]:
        epoch, first = self.start
        while True:
            batches = self.batches(epoch)
            offset = sum(map(len, batches[:first]))  # samples count from here, however they are batched
            for position in range(first, len(batches)):
                after = (epoch, position + 1) if position + 1 < len(batches) else (epoch + 1, 0)
                yield self._part(batches[position], epoch, offset, after)
                offset += len(batches[position])
            epoch, first = epoch + 1, 0

    def _part(self, batch: Sequence[int], epoch: int, offset: int, after: _Place) -> _Part:
        index, count = self.process.index, self.process.count
        if len(batch) < count:
            raise ValueError(f"a batch of {len(batch)} samples cannot be shared by {count} processes.")
        first, last = (len(batch) * i // count for i in (index, index + 1))
        return _Part(
            share=(last - first) * count / len(batch),
            indices=batch[first:last],
            seeds=[seed_from(self.seed, epoch, offset + sample) for sample in range(first, last)],
            collation_seed=seed_from(self.seed, epoch, offset, len(batch)),
            next_place=after,
        )


class _Samples:
    """Loads parts, with generators that depend on nothing but the place in the run."""

    def __init__(self, data: MapStyle, collate: Callable[[list[Any]], Any]) -> None:
        self.data, self.collate = data, collate

    def __getitem__(self, part: _Part) -> tuple[_Place, float, Any]:
        before = random_state.capture(devices=False)
        try:
            samples = []
            for index, seed in zip(part.indices, part.seeds, strict=True):
                random_state.seed_host(seed)
                samples.append(self.data[index])
            random_state.seed_host(part.collation_seed)
            return part.next_place, part.share, self.collate(samples)
        finally:
            random_state.restore(before)
