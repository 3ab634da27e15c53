"""An endless stream of batches whose position can be saved and restored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from .random_state import seed_from


class Stream(Protocol):
    """Batches without end. `state_dict` describes the position between two calls of `next`.

    Attributes:
        share: how much the last batch counts among those of all processes: its size as a multiple of their mean.
    """

    share: float

    def next(self) -> Any: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class TrainingStream(Stream, Protocol):
    """A stream to train from. `described` says what the data are; a checkpoint refuses others."""

    described: str

    @property
    def batches_per_epoch(self) -> int | None:
        """None if the data have no end."""

    def close(self) -> None:
        """Called when a run is over: let go of processes that load."""


def permutation(length: int, seed: int, epoch: int) -> list[int]:
    """The order of an epoch: a pure function of its arguments, the same on every process."""
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed_from(seed, epoch))).tolist()


class Shuffled:
    """The items of a sequence, in a new order every epoch; a pure function of `seed` and how many were drawn."""

    share = 1.0

    def __init__(self, items: Sequence[Any], seed: int) -> None:
        self.items, self.seed = items, seed
        self.drawn = 0
        self._order: list[int] = []

    def next(self) -> Any:
        epoch, position = divmod(self.drawn, len(self.items))
        if position == 0 or not self._order:
            self._order = permutation(len(self.items), self.seed, epoch)
        self.drawn += 1
        return self.items[self._order[position]]

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.drawn, self._order = state["drawn"], []
