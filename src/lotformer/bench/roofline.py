"""How far LOT is from the machine's limit: its flops per second against those of a matrix product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..results.provenance import Provenance
from .runtime import TARGET_SHAPES
from .timing import alternate
from .workload import Shape, Workload

SHAPES = (*TARGET_SHAPES, Shape(131072, batch=1, heads=4))
_FLOPS = {"forward": 8, "forward + backward": 28}  # × n·r·d: four products, and ten more for their gradients
_MATMUL = 1024


@dataclass(frozen=True)
class RooflinePoint:
    """`times_limit`: time of the call over the time of its n·r·d flops at the rate of a matrix product."""

    shape: Shape
    direction: str
    milliseconds: float
    gflops_per_second: float
    matmul_gflops_per_second: float
    times_limit: float


@dataclass(frozen=True)
class RooflineResult:
    provenance: Provenance
    rank: int
    iters: int
    lot_backend: str
    points: tuple[RooflinePoint, ...]


def run(
    shapes: Sequence[Shape],
    *,
    rank: int,
    iters: int,
    eps: float,
    backend: str,
    provenance: Provenance,
    seconds_each: float,
    on_point: Callable[[RooflinePoint], None] = lambda point: None,
) -> RooflineResult:
    """Time LOT and a square product of matrices in turns, forward and forward + backward, on every shape."""
    a, b = torch.randn(_MATMUL, _MATMUL), torch.randn(_MATMUL, _MATMUL)
    options = {"rank": rank, "iters": iters, "eps": eps, "backend": backend}
    points = []
    for shape in shapes:
        works = {
            direction: Workload("lot", shape, direction != "forward", options, provenance.seed) for direction in _FLOPS
        }
        calls: dict[str, Callable[[], object]] = {direction: work.prepare() for direction, work in works.items()}
        timings = alternate({**calls, "matmul": lambda: a @ b}, seconds_each=seconds_each)
        rate = 2.0 * _MATMUL**3 / timings["matmul"].best
        for direction, factor in _FLOPS.items():
            flops = factor * shape.batch * shape.heads * shape.n * rank * shape.head_dim
            seconds = timings[direction].best
            point = RooflinePoint(
                shape, direction, 1e3 * seconds, flops / seconds / 1e9, rate / 1e9, seconds * rate / flops
            )
            points.append(point)
            on_point(point)
    return RooflineResult(provenance, rank, iters, backend, tuple(points))
