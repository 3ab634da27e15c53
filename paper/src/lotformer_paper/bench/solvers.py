"""Costs of exactness, bf16, balancing the keys alone and given scores, against Sinkhorn sweeps in fp32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lotformer.cli.tables import Table
from lotformer.ops import lot_attention, lot_attention_from_scores
from lotformer.settings import setting

from ..results.plain import read
from ..results.provenance import Provenance
from ..results.report import Report
from .agreement import check_backend
from .settings import SAMPLE, LotSettings, agreed_backend
from .timing import alternate
from .workload import TARGET_SHAPES, Shape, Workload

NAME = "solvers"


@dataclass(frozen=True)
class SolverSettings(LotSettings):
    """Sharpness, exactness and time per measurement."""

    eps: float = setting(0.1, "Entropic regularisation of LOT.")
    tol: float = setting(1e-5, "Residual at which the exact solver stops.")
    backward: bool = setting(False, "Time forward and backward together, not forward alone.")
    max_n: int = setting(2**17, "Skip shapes with more tokens.")
    seconds: float = setting(1.0, "Seconds to spend on each alternative.")

    @property
    def direction(self) -> str:
        return "forward + backward" if self.backward else "forward"


@dataclass(frozen=True)
class SolverPoint:
    """One shape. Residuals are the largest relative errors of the column sums of the attention matrices.

    Beside sweeps, the exact solver and bf16, both solvers with the keys alone balanced, and sweeps on given scores.

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
    """Time all of them in turns on every shape, on the same tokens and pivots."""
    backend = agreed_backend(settings, heads=4, head_dim=64, backward=settings.backward)
    forms: tuple[dict[str, Any], ...] = (
        {"solver": "newton"},
        {"solver": "newton", "balance": "keys"},
        {"balance": "keys"},
        {"scores": True},
    )
    for form in forms:
        check_backend(
            backend, rank=settings.rank, head_dim=64, heads=4, n=SAMPLE, eps=settings.eps, iters=settings.iters,
            backward=settings.backward, **{"balance": settings.balance, **form},
        )  # fmt: skip
    points = []
    for shape in (shape for shape in TARGET_SHAPES if shape.n <= settings.max_n):
        calls, residual = _calls(shape, settings, backend)
        timings = alternate(calls, seconds_each=settings.seconds)
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


def _calls(
    shape: Shape, settings: SolverSettings, backend: str
) -> tuple[dict[str, Callable[[], object]], dict[str, float]]:
    """Timed variants by name, with the errors of their column sums."""
    generator = torch.Generator().manual_seed(settings.seed)
    pivots = torch.randn(shape.heads, settings.rank, shape.head_dim, generator=generator)
    log_masses = torch.zeros(shape.heads, settings.rank).log_softmax(-1)
    shared = {"eps": settings.eps, "iters": settings.iters, "tol": settings.tol, "backend": backend}
    q, k, v = Workload("sdpa", shape, seed=settings.seed).tokens()
    scores = tuple(x @ pivots.mT * shape.head_dim**-0.5 for x in (q, k))
    halves = tuple(x.bfloat16() for x in (q, k, v))
    whole, balance = (q, k, v, pivots, log_masses), settings.balance
    forms: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], dict[str, Any]]] = {
        "sinkhorn": (lot_attention, whole, {"balance": balance}),
        "newton": (lot_attention, whole, {"balance": balance, "solver": "newton"}),
        "sinkhorn bf16": (lot_attention, (*halves, pivots, log_masses), {"balance": balance}),
        "sinkhorn keys": (lot_attention, whole, {"balance": "keys"}),
        "newton keys": (lot_attention, whole, {"balance": "keys", "solver": "newton"}),
        "sinkhorn scores": (lot_attention_from_scores, (*scores, v, log_masses), {"balance": balance}),
    }
    calls: dict[str, Callable[[], object]] = {}
    residual: dict[str, float] = {}
    for name, (attend, tensors, options) in forms.items():
        inputs = tuple(x.detach().clone().requires_grad_(settings.backward) for x in tensors)
        run_once = partial(attend, *inputs, **shared, **options)
        calls[name] = partial(_both_ways if settings.backward else _forward, run_once, inputs)
        values = inputs[2].detach().requires_grad_()
        residual[name] = _residual(partial(attend, *inputs[:2], values, *inputs[3:], **shared, **options), values)
    return calls, residual


def _forward(attend: Callable[[], Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
    with torch.no_grad():
        return attend()


def _both_ways(attend: Callable[[], Tensor], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    out = attend()
    return torch.autograd.grad(out, inputs, torch.ones_like(out))


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
        f"LOT r={s.rank} T={s.iters} ε={s.eps:g} tol={s.tol:g}, backend {result.lot_backend}, {s.direction}, "
        f"threads: {s.threads}"
    )
    tables = [Table(title, columns, rows)]
    if all("newton keys" in p.milliseconds for p in result.points):
        tables.append(_forms(result))
    return Report((result.provenance.command,), tuple(tables), (f"{result.provenance.where()}.",))


def _forms(result: SolverResult) -> Table:
    """Balance of the keys alone, and given scores, as factors of what they replace."""
    rows = []
    for point in result.points:
        ms = point.milliseconds
        rows.append(
            (str(point.shape), f"{ms['sinkhorn keys']:.3f}", f"{ms['sinkhorn'] / ms['sinkhorn keys']:.2f}",
             f"{ms['newton keys']:.3f}", f"{point.residual['newton keys']:.1e}",
             f"{ms['newton'] / ms['newton keys']:.2f}", f"{ms['newton keys'] / ms['sinkhorn']:.2f}",
             f"{ms['sinkhorn scores']:.3f}", f"{ms['sinkhorn'] / ms['sinkhorn scores']:.2f}")
        )  # fmt: skip
    columns = ("shape", "keys alone,\nsweeps ms", "× faster", "keys alone,\nnewton ms", "residual", "× faster",
               "÷ sweeps\nof the first\ntable", "scores given,\nsweeps ms", "× faster")  # fmt: skip
    return Table("Against the same solver in the first table", columns, tuple(rows))


def _residual(attend: Callable[[], Tensor], values: Tensor) -> float:
    """The gradient of the summed output with respect to a value is that value's column sum, which should be 1."""
    (sums,) = torch.autograd.grad(attend().float().sum(), [values])
    return float((sums[..., 0].float() - 1).abs().amax())
