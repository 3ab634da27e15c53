"""Run time of mechanisms over the length of the sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lotformer.attention import entry
from lotformer.cli.tables import Table
from lotformer.settings import setting

from ..results.plain import read
from ..results.provenance import Provenance
from ..results.report import Report
from . import process
from .figure import Point, draw_runtime
from .limits import too_large, too_slow
from .settings import LotSettings, agreed_backend, doubling, known
from .timing import alternate
from .workload import Shape, Workload

NAME = "runtime"
QUADRATIC = ("softmax", "espformer", "espformer-hard", "sinkformer")
LINEAR = ("performer", "nystromformer", "mobiattention", "polaformer")
RANKS = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class RuntimeSettings(LotSettings):
    """Mechanisms and lengths; or, with `against`, LOT against fused softmax (`against_sdpa`)."""

    against: Literal["sdpa"] | None = setting(
        None, "Compare LOT at --rank with PyTorch's fused softmax on four shapes instead."
    )
    backward: bool = setting(False, "Time forward and backward together, not forward alone.")
    mechanisms: tuple[str, ...] = setting((*QUADRATIC, *LINEAR, "lot"), "Mechanisms to time.")
    ranks: tuple[int, ...] = setting(RANKS, "Ranks of LOT; with --against, see --rank.", at_least=1)
    min_n: int = setting(2**9, "Shortest sequence.", at_least=1)
    max_n: int = setting(2**17, "Longest sequence; lengths double from --min-n.")
    batch: int = setting(1, "Batch size.", at_least=1)
    heads: int = setting(4, "Number of heads.", at_least=1)
    head_dim: int = setting(64, "Head dimension.", at_least=1)
    seconds: float = setting(0.5, "Seconds to spend on each alternative.")
    time_limit: float = setting(20.0, "Skip calls expected to take longer than this, in seconds.")

    @property
    def direction(self) -> str:
        return "forward + backward" if self.backward else "forward"


@dataclass(frozen=True)
class Candidate:
    """A curve of the plot: a mechanism with its options."""

    label: str
    mechanism: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def panel(self) -> str:
        """The side of the figure: what the paper puts among the quadratic ones stays there, whatever its cost here."""
        linear = entry(self.mechanism).linear and self.mechanism not in QUADRATIC
        return "linear" if linear else "quadratic"


@dataclass(frozen=True)
class RuntimeResult:
    experiment: str
    provenance: Provenance
    settings: RuntimeSettings
    lot_backend: str | None
    points: tuple[Point, ...]


def candidates(mechanisms: Sequence[str], ranks: Sequence[int], lot_options: dict[str, Any]) -> list[Candidate]:
    """A curve for every mechanism, and one for every rank of LOT."""
    found = []
    for name in mechanisms:
        if name == "lot":
            found += [Candidate(f"lot r={rank}", "lot", {"rank": rank, **lot_options}) for rank in ranks]
        else:
            found.append(Candidate(name, entry(name).name))
    return found


def run(
    settings: RuntimeSettings, provenance: Provenance, listen: Callable[[str], None] = lambda what: None
) -> RuntimeResult:
    """Time all candidates in turns at every length, shortest first, leaving out what would not fit or end in time."""
    lengths = doubling(settings.min_n, settings.max_n)
    names = known(settings.mechanisms)
    backend = None
    if "lot" in names:
        backend = agreed_backend(
            settings, heads=settings.heads, head_dim=settings.head_dim, backward=settings.backward, ranks=settings.ranks
        )
    lot_options = {**settings.lot_options, "backend": settings.backend}
    chosen = candidates(names, settings.ranks, lot_options)
    points: list[Point] = []
    slowest: dict[str, tuple[Workload, float]] = {}
    largest: dict[str, tuple[Workload, int]] = {}
    for n in lengths:
        shape = Shape(n, settings.batch, settings.heads, settings.head_dim)
        tokens = Workload("sdpa", shape, settings.backward, seed=settings.seed).tokens()
        calls: dict[str, Callable[[], object]] = {}
        reasons: dict[str, str] = {}
        for candidate in chosen:
            label = candidate.label
            work = Workload(candidate.mechanism, shape, settings.backward, candidate.options, settings.seed)
            reason = too_large(work, largest.get(label)) or too_slow(work, slowest.get(label), settings.time_limit)
            if reason:
                reasons[label] = reason
                continue
            calls[label] = work.prepare(tokens)
            largest[label] = work, _bytes_of(calls[label])  # also warms it up
        timings = alternate(calls, seconds_each=settings.seconds, warm_up=False)
        for candidate in chosen:
            label, panel = candidate.label, candidate.panel
            if label in reasons:
                point = Point(label, candidate.mechanism, panel, n, None, skipped=reasons[label])
            else:
                timing = timings[label]
                slowest[label] = Workload(candidate.mechanism, shape, settings.backward, candidate.options), timing.best
                point = Point(
                    label, candidate.mechanism, panel, n, 1e3 * timing.best, 1e3 * timing.median, timing.repeats
                )
            points.append(point)
        listen(f"Timed N={n}")
    return RuntimeResult(NAME, provenance, settings, backend, tuple(points))


def render(folder: Path) -> Report:
    result = read(RuntimeResult, folder / "result.json")
    s = result.settings
    lengths = sorted({point.n for point in result.points})
    curves = {label: {p.n: p for p in result.points if p.label == label} for label in _labels(result)}
    rows = tuple(
        (label, *("–" if cells[n].milliseconds is None else f"{cells[n].milliseconds:.3g}" for n in lengths))
        for label, cells in curves.items()
    )
    left_out = [
        f"{label}: left out from N={first.n}: {first.skipped}"
        for label, cells in curves.items()
        if (first := next((cells[n] for n in lengths if cells[n].skipped), None))
    ]
    title = f"{s.direction}, milliseconds (B{s.batch} H{s.heads} D{s.head_dim})"
    return Report(
        (result.provenance.command,),
        (Table(title, ("mechanism", *map(str, lengths)), rows),),
        (*left_out, f"{result.provenance.where()}."),
        draw=lambda out: draw_runtime(
            result.points,
            f"{s.direction}, milliseconds",
            f"B{s.batch} H{s.heads} D{s.head_dim}, fp32, threads: {s.threads}, {result.provenance.cpu}, "
            f"torch {result.provenance.versions['torch']}",
            out / "figure",
        ),
    )


def _labels(result: RuntimeResult) -> list[str]:
    return list(dict.fromkeys(point.label for point in result.points))


def _bytes_of(call: Callable[[], object]) -> int:
    """Run a call once and return what it needed at most, or 0 where that cannot be measured."""
    if not process.can_measure_peak():
        call()
        return 0
    before = process.resident()
    process.reset_peak()
    call()
    return process.peak() - before
