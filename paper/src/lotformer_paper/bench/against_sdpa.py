"""LOT at one rank against PyTorch's fused softmax, and against the same operator in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lotformer.cli.tables import Table

from ..results.plain import read
from ..results.provenance import Provenance
from ..results.report import Report
from .runtime import RuntimeSettings
from .settings import agreed_backend
from .timing import alternate, ratios
from .workload import TARGET_SHAPES, Shape, Workload

NAME = "sdpa"


@dataclass(frozen=True)
class Comparison:
    """Times of alternatives on one shape, measured in turns; `times_faster` is LOT against each of them."""

    shape: Shape
    milliseconds: dict[str, float]
    times_faster: dict[str, float]


@dataclass(frozen=True)
class ComparisonResult:
    experiment: str
    provenance: Provenance
    settings: RuntimeSettings
    lot_backend: str
    comparisons: tuple[Comparison, ...]


def run(
    settings: RuntimeSettings, provenance: Provenance, listen: Callable[[str], None] = lambda what: None
) -> ComparisonResult:
    """Time the three in turns on each of the target shapes up to `max_n` tokens."""
    backend = agreed_backend(settings, heads=4, head_dim=64, backward=settings.backward)
    options = {"rank": settings.rank, **settings.lot_options}
    made = []
    for shape in (shape for shape in TARGET_SHAPES if shape.n <= settings.max_n):
        works = {
            "lot": Workload("lot", shape, settings.backward, {**options, "backend": backend}, settings.seed),
            "sdpa": Workload("sdpa", shape, settings.backward, seed=settings.seed),
            "plain PyTorch": Workload(
                "lot", shape, settings.backward, {**options, "backend": "reference"}, settings.seed
            ),
        }
        tokens = works["sdpa"].tokens()
        timings = alternate({name: work.prepare(tokens) for name, work in works.items()}, seconds_each=settings.seconds)
        milliseconds = {name: 1e3 * timing.best for name, timing in timings.items()}
        made.append(Comparison(shape, milliseconds, ratios(timings, of="lot")))
        listen(f"Timed {shape}")
    return ComparisonResult(NAME, provenance, settings, backend, tuple(made))


def render(folder: Path) -> Report:
    result = read(ComparisonResult, folder / "result.json")
    s = result.settings
    rows = tuple(
        (str(c.shape), *(f"{c.milliseconds[name]:.3f}" for name in ("lot", "sdpa", "plain PyTorch")),
         *(f"{c.times_faster[name]:.2f}" for name in ("sdpa", "plain PyTorch")))
        for c in result.comparisons
    )  # fmt: skip
    columns = ("shape", "lot\nms", "sdpa\nms", "plain\nPyTorch\nms", "lot ×\nfaster\nthan sdpa",
               "lot × faster\nthan plain\nPyTorch")  # fmt: skip
    balance = "" if s.balance == "both" else f", balance {s.balance}"
    title = f"LOT r={s.rank} T={s.iters}{balance} ({result.lot_backend}), {s.direction}, threads: {s.threads}"
    return Report((result.provenance.command,), (Table(title, columns, rows),), (f"{result.provenance.where()}.",))
