"""Timing of alternatives against each other on a noisy machine: in turns, best of many."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .process import memory_kept


@dataclass(frozen=True)
class Timing:
    """The best and the middle of `repeats` calls, in seconds."""

    best: float
    median: float
    repeats: int


def alternate(
    runs: Mapping[str, Callable[[], object]],
    *,
    seconds_each: float = 0.5,
    min_repeats: int = 3,
    max_repeats: int = 400,
    patience: float = 10.0,
    warm_up: bool = True,
) -> dict[str, Timing]:
    """Time the runs in turns, so that a slow moment of the machine hits all of them.

    The process keeps the memory it has had meanwhile. Otherwise every run would pay for fresh pages after another one
    gave memory back, and the order of the runs would decide who pays.

    A run leaves the rotation when it has had its seconds and `min_repeats`, or `max_repeats`, or all the
    `patience` in seconds there is for a slow one.
    """
    samples: dict[str, list[float]] = {name: [] for name in runs}
    waiting = dict(runs)
    with memory_kept():
        if warm_up:
            for run in runs.values():
                run()
        while waiting:
            for name, run in list(waiting.items()):
                start = time.perf_counter()
                run()
                taken = samples[name]
                taken.append(time.perf_counter() - start)
                spent = sum(taken)
                enough = len(taken) >= min_repeats and spent >= seconds_each
                if enough or len(taken) >= max_repeats or spent >= patience:
                    del waiting[name]
    return {name: Timing(min(s), sorted(s)[len(s) // 2], len(s)) for name, s in samples.items()}


def ratios(timings: Mapping[str, Timing], of: str) -> dict[str, float]:
    """The time of each of the others relative to that of `of`."""
    return {name: timing.best / timings[of].best for name, timing in timings.items() if name != of}
