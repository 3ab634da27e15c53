"""Limits: workloads that would take too long or too much memory are skipped, and the result says so."""

from __future__ import annotations

from lotformer.attention import entry

from . import process
from .workload import Workload

_SHARE_OF_MEMORY = 0.6
_KEPT_FOR_BACKWARD = 3.0  # a graph keeps its intermediates and makes their gradients


def growth(before: Workload, after: Workload) -> float:
    """By how much the work grows from one shape to the next, from the mechanism's cost formula."""
    name = "softmax" if after.mechanism == "sdpa" else after.mechanism
    cost = entry(name).cost
    old, new = (cost(w.shape.n, w.shape.head_dim, **w.options).flops * w.shape.batch * w.shape.heads
                for w in (before, after))  # fmt: skip
    return new / old


def too_slow(workload: Workload, last: tuple[Workload, float] | None, limit: float) -> str | None:
    """The reason why a workload would exceed the limit, from the seconds that the last smaller one took."""
    if last is None:
        return None
    seconds = last[1] * growth(last[0], workload)
    return f"about {seconds:.0f} s per call, limit {limit:g} s" if seconds > limit else None


def too_large(workload: Workload, last: tuple[Workload, int] | None = None) -> str | None:
    """The reason why a workload would not fit in memory, from its cost formula and the last smaller one's bytes."""
    free = process.available()
    if free is None:
        return None
    name = "softmax" if workload.mechanism == "sdpa" else workload.mechanism
    shape = workload.shape
    needed = entry(name).cost(shape.n, shape.head_dim, **workload.options).bytes * shape.batch * shape.heads
    needed *= _KEPT_FOR_BACKWARD if workload.backward else 1.0
    if last is not None:
        needed = max(needed, last[1] * growth(last[0], workload))
    if needed <= _SHARE_OF_MEMORY * free:
        return None
    return f"about {needed / 2**30:.0f} GiB, {free / 2**30:.0f} GiB free"
