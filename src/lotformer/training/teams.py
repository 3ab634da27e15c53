"""The processes of a run: alone, or many that must agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Process:
    """The rank of this process, and the number of processes that share the run."""

    index: int = 0
    count: int = 1


class Team(Protocol):
    """The processes that run a loop in step, as the loop sees them."""

    process: Process

    def gather(self, value: Any) -> list[Any]:
        """The value of every process, in their order. All of them must call it."""

    def gather_numbers(self, values: Sequence[float]) -> list[list[float]]:
        """The same for a few numbers, cheap enough for every step."""


class Alone:
    """One process."""

    process = Process()

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def gather_numbers(self, values: Sequence[float]) -> list[list[float]]:
        return [list(values)]
