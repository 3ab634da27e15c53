"""Run time of mechanisms over the length of the sequence, and of LOT against fused softmax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..attention import entry
from ..results.provenance import Provenance
from . import process
from .limits import too_large, too_slow
from .timing import alternate, ratios
from .workload import Shape, Workload

QUADRATIC = ("softmax", "espformer", "espformer-hard", "sinkformer")
LINEAR = ("performer", "nystromformer", "mobiattention", "polaformer")
RANKS = (16, 32, 64, 128, 256)
TARGET_SHAPES = (
    Shape(197, batch=16, heads=3),
    Shape(1024, batch=4, heads=4),
    Shape(4096, batch=1, heads=4),
    Shape(16384, batch=1, heads=4),
)


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
class Point:
    """Time of one call at one length; `skipped` says why there is none."""

    label: str
    mechanism: str
    panel: str
    n: int
    milliseconds: float | None
    median_milliseconds: float | None = None
    repeats: int = 0
    skipped: str | None = None


@dataclass(frozen=True)
class RuntimeResult:
    provenance: Provenance
    direction: str
    batch: int
    heads: int
    head_dim: int
    lot_backend: str | None
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Comparison:
    """Times of alternatives on one shape, measured in turns; `times_faster` is against LOT."""

    shape: Shape
    milliseconds: dict[str, float]
    times_faster: dict[str, float]


@dataclass(frozen=True)
class ComparisonResult:
    provenance: Provenance
    direction: str
    rank: int
    iters: int
    lot_backend: str
    comparisons: tuple[Comparison, ...]


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
    chosen: Sequence[Candidate],
    lengths: Sequence[int],
    shape: Shape,
    *,
    backward: bool,
    provenance: Provenance,
    lot_backend: str | None,
    seconds_each: float,
    time_limit: float,
    on_point: Callable[[Point], None] = lambda point: None,
) -> RuntimeResult:
    """Time all candidates in turns at every length, shortest first, leaving out what would not fit or end in time."""
    points: list[Point] = []
    slowest: dict[str, tuple[Workload, float]] = {}
    largest: dict[str, tuple[Workload, int]] = {}
    for n in sorted(lengths):
        sized = Shape(n, shape.batch, shape.heads, shape.head_dim)
        base = Workload("sdpa", sized, backward, seed=provenance.seed)
        tokens = base.tokens()
        calls: dict[str, Callable[[], object]] = {}
        reasons: dict[str, str] = {}
        for candidate in chosen:
            label = candidate.label
            work = Workload(candidate.mechanism, sized, backward, candidate.options, provenance.seed)
            reason = too_large(work, largest.get(label)) or too_slow(work, slowest.get(label), time_limit)
            if reason:
                reasons[label] = reason
                continue
            calls[label] = work.prepare(tokens)
            largest[label] = work, _bytes_of(calls[label])  # also warms it up
        timings = alternate(calls, seconds_each=seconds_each, warm_up=False)
        for candidate in chosen:
            label, panel = candidate.label, candidate.panel
            if label in reasons:
                point = Point(label, candidate.mechanism, panel, n, None, skipped=reasons[label])
            else:
                timing = timings[label]
                slowest[label] = Workload(candidate.mechanism, sized, backward, candidate.options), timing.best
                point = Point(
                    label, candidate.mechanism, panel, n, 1e3 * timing.best, 1e3 * timing.median, timing.repeats
                )
            points.append(point)
            on_point(point)
    return RuntimeResult(
        provenance, _direction(backward), shape.batch, shape.heads, shape.head_dim, lot_backend, tuple(points)
    )


def compare_with_sdpa(
    shapes: Sequence[Shape],
    *,
    rank: int,
    iters: int,
    eps: float,
    backend: str,
    backward: bool,
    provenance: Provenance,
    seconds_each: float,
    on_comparison: Callable[[Comparison], None] = lambda comparison: None,
) -> ComparisonResult:
    """LOT against fused softmax and against the same operator in plain PyTorch, on each shape in turns."""
    made = []
    for shape in shapes:
        options = {"rank": rank, "iters": iters, "eps": eps}
        works = {
            "lot": Workload("lot", shape, backward, {**options, "backend": backend}, provenance.seed),
            "sdpa": Workload("sdpa", shape, backward, seed=provenance.seed),
            "plain PyTorch": Workload("lot", shape, backward, {**options, "backend": "reference"}, provenance.seed),
        }
        tokens = works["sdpa"].tokens()
        timings = alternate({name: work.prepare(tokens) for name, work in works.items()}, seconds_each=seconds_each)
        comparison = Comparison(
            shape,
            {name: 1e3 * timing.best for name, timing in timings.items()},
            ratios(timings, of="lot"),
        )
        made.append(comparison)
        on_comparison(comparison)
    return ComparisonResult(provenance, _direction(backward), rank, iters, backend, tuple(made))


def _direction(backward: bool) -> str:
    return "forward + backward" if backward else "forward"


def _bytes_of(call: Callable[[], object]) -> int:
    """Run a call once and return what it needed at most, or 0 where that cannot be measured."""
    if not process.can_measure_peak():
        call()
        return 0
    before = process.resident()
    process.reset_peak()
    call()
    return process.peak() - before
