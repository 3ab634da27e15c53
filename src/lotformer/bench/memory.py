"""Memory of LOT against fused softmax: bytes kept for backward, and the peak over forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..results.provenance import Provenance
from .limits import too_large, too_slow
from .peak import measure
from .workload import Shape, Workload


@dataclass(frozen=True)
class MemoryPoint:
    """Bytes beyond q, k, v, the output and their gradients; `skipped` says why there are none."""

    label: str
    n: int
    saved_bytes: int | None
    peak_bytes: int | None
    skipped: str | None = None


@dataclass(frozen=True)
class MemoryResult:
    provenance: Provenance
    batch: int
    heads: int
    head_dim: int
    points: tuple[MemoryPoint, ...]


def run(
    alternatives: dict[str, tuple[str, dict[str, object]]],
    lengths: Sequence[int],
    shape: Shape,
    *,
    provenance: Provenance,
    time_limit: float,
    on_point: Callable[[MemoryPoint], None] = lambda point: None,
) -> MemoryResult:
    """Measure every alternative, label → (mechanism, options), at every length, forward and backward."""
    points = []
    for label, (mechanism, options) in alternatives.items():
        last: tuple[Workload, float] | None = None
        for n in sorted(lengths):
            sized = Shape(n, shape.batch, shape.heads, shape.head_dim)
            workload = Workload(mechanism, sized, backward=True, options=dict(options), seed=provenance.seed)
            skipped = too_large(workload) or too_slow(workload, last, time_limit)
            if skipped:
                point = MemoryPoint(label, n, None, None, skipped)
            else:
                usage = measure([workload], provenance.threads)[0]
                last = workload, usage.seconds
                point = MemoryPoint(label, n, usage.saved, usage.peak)
            points.append(point)
            on_point(point)
    return MemoryResult(provenance, shape.batch, shape.heads, shape.head_dim, tuple(points))
