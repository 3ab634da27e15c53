"""LOT against the machine's limit: its flops per second beside those of a matrix product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from lotformer.cli.tables import Table
from lotformer.settings import setting

from ..results.plain import read
from ..results.provenance import Provenance
from ..results.report import Report
from .settings import LotSettings, agreed_backend
from .timing import alternate
from .workload import TARGET_SHAPES, Shape, Workload

NAME = "roofline"
SHAPES = (*TARGET_SHAPES, Shape(131072, batch=1, heads=4))
_FLOPS = {"forward": 8, "forward + backward": 28}  # × n·r·d: four products, and ten more for their gradients
_MATMUL = 1024


@dataclass(frozen=True)
class RooflineSettings(LotSettings):
    """Shapes and time per measurement."""

    max_n: int = setting(2**17, "Skip shapes with more tokens.")
    seconds: float = setting(1.0, "Seconds to spend on each call.")


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
    experiment: str
    provenance: Provenance
    settings: RooflineSettings
    lot_backend: str
    points: tuple[RooflinePoint, ...]


def run(
    settings: RooflineSettings, provenance: Provenance, listen: Callable[[str], None] = lambda what: None
) -> RooflineResult:
    """Time LOT and a square product of matrices in turns, forward and forward + backward, on every shape."""
    backend = agreed_backend(settings, heads=4, head_dim=64, backward=True)
    a, b = torch.randn(_MATMUL, _MATMUL), torch.randn(_MATMUL, _MATMUL)
    options = {"rank": settings.rank, **settings.lot_options, "backend": backend}
    points = []
    for shape in (shape for shape in SHAPES if shape.n <= settings.max_n):
        works = {
            direction: Workload("lot", shape, direction != "forward", options, settings.seed) for direction in _FLOPS
        }
        calls: dict[str, Callable[[], object]] = {direction: work.prepare() for direction, work in works.items()}
        timings = alternate({**calls, "matmul": lambda: a @ b}, seconds_each=settings.seconds)
        rate = 2.0 * _MATMUL**3 / timings["matmul"].best
        for direction, factor in _FLOPS.items():
            flops = factor * shape.batch * shape.heads * shape.n * settings.rank * shape.head_dim
            seconds = timings[direction].best
            points.append(
                RooflinePoint(
                    shape, direction, 1e3 * seconds, flops / seconds / 1e9, rate / 1e9, seconds * rate / flops
                )
            )
        listen(f"Timed {shape}")
    return RooflineResult(NAME, provenance, settings, backend, tuple(points))


def render(folder: Path) -> Report:
    result = read(RooflineResult, folder / "result.json")
    s = result.settings
    rows = tuple(
        (str(p.shape), p.direction, f"{p.milliseconds:.3f}", f"{p.gflops_per_second:.1f}",
         f"{p.matmul_gflops_per_second:.1f}", f"{p.times_limit:.2f}")
        for p in result.points
    )  # fmt: skip
    columns = ("shape", "direction", "ms", "GFLOP/s", "matmul\nGFLOP/s", "× time at\nits rate")
    title = f"LOT r={s.rank} T={s.iters}, backend {result.lot_backend}, threads: {s.threads}"
    return Report(
        (result.provenance.command,), (Table(title, columns, rows, left=2),), (f"{result.provenance.where()}.",)
    )
