"""The table of mechanisms: what each promises, and what it costs on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..attention import entry
from ..results.provenance import Provenance
from . import process
from .limits import too_large
from .peak import measure
from .timing import alternate
from .workload import Shape, Workload

LOT_RANK, LOT_ITERS, LOT_EPS = 32, 5, 1.0


@dataclass(frozen=True)
class ZooRow:
    """A mechanism; flops for all heads, milliseconds of a forward, peak bytes of forward and backward.

    `notes` says what could not be measured and why.
    """

    name: str
    summary: str
    citation: str
    time: str
    doubly_stochastic: str | None
    causal_only: str | None
    stochastic: bool
    fixed_length: bool
    needs_equal_lengths: bool
    needs_grid: bool
    parameters: int
    flops: dict[int, float]
    milliseconds: dict[int, float]
    peak_bytes: int | None = None
    notes: str = ""


@dataclass(frozen=True)
class ZooResult:
    provenance: Provenance
    batch: int
    heads: int
    head_dim: int
    short: int
    long: int
    lot_backend: str | None
    rows: tuple[ZooRow, ...]


def run(
    mechanisms: Sequence[str],
    shape: Shape,
    long: int,
    *,
    provenance: Provenance,
    lot_backend: str | None,
    seconds_each: float,
    on_row: Callable[[str], None] = lambda name: None,
) -> ZooResult:
    """Time every mechanism at `shape.n` tokens, the linear ones at `long` too. Memory at `shape.n`."""
    options: dict[str, Any] = {"rank": LOT_RANK, "iters": LOT_ITERS, "eps": LOT_EPS, "backend": lot_backend}
    works = [
        Workload(name, shape, options=options if name == "lot" else {}, seed=provenance.seed) for name in mechanisms
    ]
    rows = []
    for work in works:
        rows.append(_row(work, long, seconds_each))
        on_row(work.mechanism)
    peaks, reasons = _peaks(works, provenance.threads)
    complete = (
        replace(
            row,
            peak_bytes=peaks.get(row.name),
            notes="; ".join(note for note in (row.notes, reasons.get(row.name)) if note),
        )
        for row in rows
    )
    backend = lot_backend if "lot" in mechanisms else None
    return ZooResult(provenance, shape.batch, shape.heads, shape.head_dim, shape.n, long, backend, tuple(complete))


def _row(work: Workload, long: int, seconds_each: float) -> ZooRow:
    """All about a mechanism but its memory."""
    name, shape = work.mechanism, work.shape
    about = entry(name)
    notes, milliseconds, parameters = [], {}, 0
    for n in (shape.n, long) if about.linear else (shape.n,):
        sized = replace(work, shape=replace(shape, n=n))
        reason = too_large(sized)
        if reason:
            notes.append(f"N={n}: {reason}")
            continue
        milliseconds[n] = 1e3 * alternate({name: sized.prepare()}, seconds_each=seconds_each)[name].best
    module = work.module()
    if module is not None:
        parameters = sum(p.numel() for p in module.parameters())
    heads = shape.batch * shape.heads
    return ZooRow(
        name=name,
        summary=about.summary,
        citation=about.citation,
        time=about.time,
        doubly_stochastic=about.doubly_stochastic,
        causal_only=about.causal_only,
        stochastic=about.stochastic,
        fixed_length=about.fixed_length,
        needs_equal_lengths=about.needs_equal_lengths,
        needs_grid=about.needs_grid,
        parameters=parameters,
        flops={n: heads * about.cost(n, shape.head_dim, **work.options).flops for n in (shape.n, long)},
        milliseconds=milliseconds,
        notes="; ".join(notes),
    )


def _peaks(works: Sequence[Workload], threads: int) -> tuple[dict[str, int], dict[str, str]]:
    """Peak bytes by name, and for the others why there are none; one process measures them all."""
    if not process.can_measure_peak():
        return {}, {}
    both_ways = {work.mechanism: replace(work, backward=True) for work in works}
    reasons = {name: f"memory: {reason}" for name, work in both_ways.items() if (reason := too_large(work))}
    fitting = {name: work for name, work in both_ways.items() if name not in reasons}
    usages = measure(list(fitting.values()), threads)
    return {name: usage.peak for name, usage in zip(fitting, usages, strict=True)}, reasons
