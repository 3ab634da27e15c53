"""The processes of a run: alone, or many that must agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Process:
    """Which process this is, of how many that share a run."""

    index: int = 0
    count: int = 1


class Team(Protocol):
    """What a loop needs to know of the processes that run it in step."""

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
