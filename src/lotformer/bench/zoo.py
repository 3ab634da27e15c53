"""The table of mechanisms: what each promises, and what it costs on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..attention import entry
from . import process
from .limits import too_large
from .peak import measure
from .report import Provenance
from .timing import alternate
from .workload import Shape, Workload


@dataclass(frozen=True)
class ZooRow:
    """A mechanism; flops for all heads, milliseconds of a forward, peak bytes of forward and backward.

    `notes` says what could not be measured and why.
    """

    name: str
    summary: str
    citation: str
    linear: bool
    doubly_stochastic: bool
    causal_only: bool
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
    rows: tuple[ZooRow, ...]


def run(
    mechanisms: Sequence[str],
    shape: Shape,
    long: int,
    *,
    provenance: Provenance,
    seconds_each: float,
    on_row: Callable[[str], None] = lambda name: None,
) -> ZooResult:
    """Time every mechanism at `shape.n` tokens, the linear ones at `long` too. Memory at `shape.n`."""
    rows = []
    for name in mechanisms:
        rows.append(_row(name, shape, long, provenance.seed, seconds_each))
        on_row(name)
    peaks, reasons = _peaks(mechanisms, shape, provenance)
    complete = (
        replace(
            row,
            peak_bytes=peaks.get(row.name),
            notes="; ".join(note for note in (row.notes, reasons.get(row.name)) if note),
        )
        for row in rows
    )
    return ZooResult(provenance, shape.batch, shape.heads, shape.head_dim, shape.n, long, tuple(complete))


def _row(name: str, shape: Shape, long: int, seed: int, seconds_each: float) -> ZooRow:
    """All about a mechanism but its memory."""
    about = entry(name)
    notes, milliseconds, parameters = [], {}, 0
    for n in (shape.n, long) if about.linear else (shape.n,):
        work = Workload(name, Shape(n, shape.batch, shape.heads, shape.head_dim), seed=seed)
        reason = too_large(work)
        if reason:
            notes.append(f"N={n}: {reason}")
            continue
        milliseconds[n] = 1e3 * alternate({name: work.prepare()}, seconds_each=seconds_each)[name].best
    module = Workload(name, shape, seed=seed).module()
    if module is not None:
        parameters = sum(p.numel() for p in module.parameters())
    heads = shape.batch * shape.heads
    return ZooRow(
        name=name,
        summary=about.summary,
        citation=about.citation,
        linear=about.linear,
        doubly_stochastic=about.doubly_stochastic,
        causal_only=about.causal_only,
        stochastic=about.stochastic,
        fixed_length=about.fixed_length,
        needs_equal_lengths=about.needs_equal_lengths,
        needs_grid=about.needs_grid,
        parameters=parameters,
        flops={n: heads * about.cost(n, shape.head_dim).flops for n in (shape.n, long)},
        milliseconds=milliseconds,
        notes="; ".join(notes),
    )


def _peaks(mechanisms: Sequence[str], shape: Shape, provenance: Provenance) -> tuple[dict[str, int], dict[str, str]]:
    """Peak bytes by name, and for the others why there are none; one process measures them all."""
    if not process.can_measure_peak():
        return {}, {}
    works = {name: Workload(name, shape, backward=True, seed=provenance.seed) for name in mechanisms}
    reasons = {name: f"memory: {reason}" for name, work in works.items() if (reason := too_large(work))}
    fitting = {name: work for name, work in works.items() if name not in reasons}
    usages = measure(list(fitting.values()), provenance.threads)
    return {name: usage.peak for name, usage in zip(fitting, usages, strict=True)}, reasons
