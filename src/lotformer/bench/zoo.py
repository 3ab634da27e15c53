"""The table of mechanisms: what each promises, and what it costs on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    peak_bytes: int | None
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
    """Measure every mechanism at `shape.n` tokens, the linear ones at `long` too. Memory at `shape.n`."""
    rows = []
    for name in mechanisms:
        rows.append(_row(name, shape, long, provenance, seconds_each))
        on_row(name)
    return ZooResult(provenance, shape.batch, shape.heads, shape.head_dim, shape.n, long, tuple(rows))


def _row(name: str, shape: Shape, long: int, provenance: Provenance, seconds_each: float) -> ZooRow:
    about = entry(name)
    notes = []
    milliseconds = {}
    for n in (shape.n, long) if about.linear else (shape.n,):
        work = Workload(name, Shape(n, shape.batch, shape.heads, shape.head_dim), seed=provenance.seed)
        reason = too_large(work)
        if reason:
            notes.append(f"N={n}: {reason}")
            continue
        milliseconds[n] = 1e3 * alternate({name: work.prepare()}, seconds_each=seconds_each)[name].best
    training = Workload(name, shape, backward=True, seed=provenance.seed)
    module = training.module()
    peak = None
    reason = too_large(training)
    if reason:
        notes.append(f"memory: {reason}")
    elif process.can_measure_peak():
        peak = measure([training], provenance.threads)[0].peak
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
        parameters=0 if module is None else sum(p.numel() for p in module.parameters()),
        flops={n: heads * about.cost(n, shape.head_dim).flops for n in (shape.n, long)},
        milliseconds=milliseconds,
        peak_bytes=peak,
        notes="; ".join(notes),
    )
