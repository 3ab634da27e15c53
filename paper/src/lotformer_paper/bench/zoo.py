"""The table of mechanisms: what each promises, and what it costs on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lotformer import attention
from lotformer.attention import entry
from lotformer.cli.tables import Table
from lotformer.settings import setting

from ..results.plain import read
from ..results.provenance import Provenance
from ..results.report import Report
from . import process
from .limits import too_large
from .peak import measure
from .settings import LotSettings, agreed_backend, known
from .timing import alternate
from .workload import Shape, Workload

NAME = "zoo"

NEEDS = {
    "needs_equal_lengths": "as many queries as keys",
    "needs_grid": "tokens on a 2-D grid",
    "fixed_length": "a known maximal length",
    "stochastic": "random numbers at evaluation",
}


@dataclass(frozen=True)
class ZooSettings(LotSettings):
    """Mechanisms and sizes."""

    mechanisms: tuple[str, ...] = setting((), "Mechanisms to list; by default all.")
    n: int = setting(1024, "Sequence length for times and memory.", at_least=1)
    long: int = setting(16384, "Longer sequence, for linear mechanisms only.", at_least=1)
    heads: int = setting(4, "Number of heads.", at_least=1)
    head_dim: int = setting(64, "Head dimension.", at_least=1)
    seconds: float = setting(0.3, "Seconds to spend on each call.")


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
    experiment: str
    provenance: Provenance
    settings: ZooSettings
    lot_backend: str | None
    rows: tuple[ZooRow, ...]


def run(settings: ZooSettings, provenance: Provenance, listen: Callable[[str], None] = lambda what: None) -> ZooResult:
    """Time every mechanism at `n` tokens, the linear ones at `long` too. Memory at `n`."""
    names = known(settings.mechanisms) or attention.names()
    backend = None
    if "lot" in names:
        backend = agreed_backend(settings, heads=settings.heads, head_dim=settings.head_dim, backward=True)
    options = {"rank": settings.rank, **settings.lot_options, "backend": backend}
    shape = Shape(settings.n, 1, settings.heads, settings.head_dim)
    works = [Workload(name, shape, options=options if name == "lot" else {}, seed=settings.seed) for name in names]
    rows = []
    for work in works:
        rows.append(_row(work, settings.long, settings.seconds))
        listen(f"Measured {work.mechanism} ({len(rows)} of {len(works)})")
    peaks, reasons = _peaks(works, settings.threads)
    complete = (
        replace(
            row,
            peak_bytes=peaks.get(row.name),
            notes="; ".join(note for note in (row.notes, reasons.get(row.name)) if note),
        )
        for row in rows
    )
    return ZooResult(NAME, provenance, settings, backend, tuple(complete))


def render(folder: Path) -> Report:
    result = read(ZooResult, folder / "result.json")
    s = result.settings
    sizes = (s.n, s.long)
    rows = tuple(
        (
            row.name,
            row.time,
            row.doubly_stochastic or "",
            _count(row.parameters),
            *(_number(row.flops[n] / 1e9) for n in sizes),
            *(_number(row.milliseconds[n]) if n in row.milliseconds else "–" for n in sizes),
            "–" if row.peak_bytes is None else _number(row.peak_bytes / 2**20),
        )
        for row in result.rows
    )
    short, long = map(_count, sizes)
    columns = ("mechanism", "time", "doubly\nstoch.", "para-\nmeters", f"GFLOP\nN={short}", f"GFLOP\nN={long}",
               f"ms\nN={short}", f"ms\nN={long}", f"MiB\nN={short}")  # fmt: skip
    title = f"H{s.heads} D{s.head_dim}, fp32, threads: {s.threads}"
    notes = ["ms: of a forward pass. MiB: peak of forward and backward."]
    if any(row.doubly_stochastic for row in result.rows):
        notes.append("converged: rows and columns sum to one as far as the mechanism's iterations have got.")
    for flag, words in NEEDS.items():
        if who := [row.name for row in result.rows if getattr(row, flag)]:
            notes.append(f"needs {words}: {', '.join(who)}.")
    for option in sorted({row.causal_only for row in result.rows if row.causal_only}):
        who = [row.name for row in result.rows if row.causal_only == option]
        notes.append(f"causal with {option}, otherwise both ways: {', '.join(who)}.")
    notes += [f"{row.name} was not measured at {row.notes}." for row in result.rows if row.notes]
    return Report(
        (result.provenance.command,),
        (Table(title, columns, rows, left=3),),
        (*notes, f"{result.provenance.where()}."),
    )


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


def _count(value: int) -> str:
    """A whole number in a few characters: 512, 1k, 16k, 2.11k, 4.2M; powers of two by 1024."""
    if value < 1000:
        return str(value)
    for divisor, unit in ((1024, "k"), (1024**2, "M")):
        if value % divisor == 0 and value // divisor < 1000:
            return f"{value // divisor}{unit}"
    return f"{value / 1e3:.3g}k" if value < 1e6 else f"{value / 1e6:.3g}M"


def _number(value: float) -> str:
    """In five characters up to 99999: three digits, or three decimals below one."""
    decimals = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{decimals}f}"
