"""What exactness and what bf16 cost: Newton and bf16 tokens against Sinkhorn sweeps in fp32, with their residuals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..ops import lot_attention
from ..results.provenance import Provenance
from .timing import alternate
from .workload import Shape, Workload


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
    provenance: Provenance
    rank: int
    iters: int
    eps: float
    tol: float
    lot_backend: str
    points: tuple[SolverPoint, ...]


def run(
    shapes: Sequence[Shape],
    *,
    rank: int,
    iters: int,
    eps: float,
    tol: float,
    backend: str,
    provenance: Provenance,
    seconds_each: float,
    on_point: Callable[[SolverPoint], None] = lambda point: None,
) -> SolverResult:
    """Time the three in turns on every shape, forward, on the same tokens and pivots."""
    points = []
    for shape in shapes:
        generator = torch.Generator().manual_seed(provenance.seed)
        pivots = torch.randn(shape.heads, rank, shape.head_dim, generator=generator)
        settings: dict[str, Any] = {
            "pivots": pivots,
            "log_masses": torch.zeros(shape.heads, rank).log_softmax(-1),
            "eps": eps,
            "iters": iters,
            "tol": tol,
            "backend": backend,
        }
        tokens = Workload("sdpa", shape, seed=provenance.seed).tokens()
        q, k, v = tokens
        halves = tuple(x.bfloat16() for x in tokens)
        attend = {
            "sinkhorn": partial(lot_attention, q, k, **settings),
            "newton": partial(lot_attention, q, k, solver="newton", **settings),
            "sinkhorn bf16": partial(lot_attention, *halves[:2], **settings),
        }
        values = {"sinkhorn": v, "newton": v, "sinkhorn bf16": halves[2]}
        residual = {name: _residual(run_once, values[name]) for name, run_once in attend.items()}
        with torch.no_grad():
            timings = alternate(
                {name: partial(run_once, values[name]) for name, run_once in attend.items()}, seconds_each=seconds_each
            )
        best = {name: timing.best for name, timing in timings.items()}
        point = SolverPoint(
            shape,
            {name: 1e3 * seconds for name, seconds in best.items()},
            residual,
            best["newton"] / best["sinkhorn"],
            best["sinkhorn"] / best["sinkhorn bf16"],
        )
        points.append(point)
        on_point(point)
    return SolverResult(provenance, rank, iters, eps, tol, backend, tuple(points))


def _residual(attend: Callable[[Tensor], Tensor], v: Tensor) -> float:
    """The gradient of the summed output with respect to a value is that value's column sum, which should be 1."""
    values = v.detach().clone().requires_grad_()
    (sums,) = torch.autograd.grad(attend(values).float().sum(), [values])
    return float((sums[..., 0].float() - 1).abs().amax())
