"""What exactness and what bf16 cost: Newton and bf16 tokens against Sinkhorn sweeps in fp32, with their residuals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._settings import setting
from ..ops import lot_attention
from ..results.plain import read
from ..results.provenance import Provenance
from ..results.report import Report
from ..results.tables import Table
from .settings import LotSettings, agreed_backend
from .timing import alternate
from .workload import TARGET_SHAPES, Shape, Workload

NAME = "solvers"


@dataclass(frozen=True)
class SolverSettings(LotSettings):
    """How sharp, how exact, and for how long."""

    eps: float = setting(0.1, "Entropic regularisation of LOT.")
    tol: float = setting(1e-5, "Residual at which the exact solver stops.")
    max_n: int = setting(2**17, "Skip shapes with more tokens.")
    seconds: float = setting(1.0, "Seconds to spend on each alternative.")


@dataclass(frozen=True)
class SolverPoint:
    """One shape. Residuals are the largest relative errors of the column sums of the attention matrices.

    `newton_times`: time of the exact solve over that of the sweeps. `bf16_times_faster`: sweeps in fp32 over sweeps
    on bf16 tokens.
    """

    shape: Shape
    milliseconds: dict[str, float]
    residual: dict[str, float]
    newton_times: float
    bf16_times_faster: float


@dataclass(frozen=True)
class SolverResult:
    experiment: str
    provenance: Provenance
    settings: SolverSettings
    lot_backend: str
    points: tuple[SolverPoint, ...]


def run(
    settings: SolverSettings, provenance: Provenance, listen: Callable[[str], None] = lambda what: None
) -> SolverResult:
    """Time the three in turns on every shape, forward, on the same tokens and pivots."""
    backend = agreed_backend(settings, heads=4, head_dim=64, backward=False)
    points = []
    for shape in (shape for shape in TARGET_SHAPES if shape.n <= settings.max_n):
        generator = torch.Generator().manual_seed(settings.seed)
        options: dict[str, Any] = {
            "pivots": torch.randn(shape.heads, settings.rank, shape.head_dim, generator=generator),
            "log_masses": torch.zeros(shape.heads, settings.rank).log_softmax(-1),
            "eps": settings.eps,
            "iters": settings.iters,
            "tol": settings.tol,
            "backend": backend,
        }
        tokens = Workload("sdpa", shape, seed=settings.seed).tokens()
        q, k, v = tokens
        halves = tuple(x.bfloat16() for x in tokens)
        attend = {
            "sinkhorn": partial(lot_attention, q, k, **options),
            "newton": partial(lot_attention, q, k, solver="newton", **options),
            "sinkhorn bf16": partial(lot_attention, *halves[:2], **options),
        }
        values = {"sinkhorn": v, "newton": v, "sinkhorn bf16": halves[2]}
        residual = {name: _residual(run_once, values[name]) for name, run_once in attend.items()}
        with torch.no_grad():
            timings = alternate(
                {name: partial(run_once, values[name]) for name, run_once in attend.items()},
                seconds_each=settings.seconds,
            )
        best = {name: timing.best for name, timing in timings.items()}
        points.append(
            SolverPoint(
                shape,
                {name: 1e3 * seconds for name, seconds in best.items()},
                residual,
                best["newton"] / best["sinkhorn"],
                best["sinkhorn"] / best["sinkhorn bf16"],
            )
        )
        listen(f"Timed {shape}")
    return SolverResult(NAME, provenance, settings, backend, tuple(points))


def render(folder: Path) -> Report:
    result = read(SolverResult, folder / "result.json")
    s = result.settings
    rows = tuple(
        (str(p.shape), f"{p.milliseconds['sinkhorn']:.3f}", f"{p.residual['sinkhorn']:.1e}",
         f"{p.milliseconds['newton']:.3f}", f"{p.residual['newton']:.1e}", f"{p.newton_times:.2f}",
         f"{p.milliseconds['sinkhorn bf16']:.3f}", f"{p.bf16_times_faster:.2f}")
        for p in result.points
    )  # fmt: skip
    columns = ("shape", "sweeps\nms", "sweeps\nresidual", "newton\nms", "newton\nresidual", "newton\n÷ sweeps",
               "bf16\nms", "bf16\n× faster")  # fmt: skip
    title = (
        f"LOT r={s.rank} T={s.iters} ε={s.eps:g} tol={s.tol:g}, backend {result.lot_backend}, forward, "
        f"threads: {s.threads}"
    )
    return Report((result.provenance.command,), (Table(title, columns, rows),), (f"{result.provenance.where()}.",))


def _residual(attend: Callable[[Tensor], Tensor], v: Tensor) -> float:
    """The gradient of the summed output with respect to a value is that value's column sum, which should be 1."""
    values = v.detach().clone().requires_grad_()
    (sums,) = torch.autograd.grad(attend(values).float().sum(), [values])
    return float((sums[..., 0].float() - 1).abs().amax())
