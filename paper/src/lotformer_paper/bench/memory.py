"""Memory of LOT against fused softmax: bytes kept for backward, and the peak over forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lotformer.cli.tables import Table
from lotformer.settings import setting

from ..results.plain import read
from ..results.provenance import Provenance
from ..results.report import Report
from .limits import too_large, too_slow
from .peak import measure
from .settings import LotSettings, agreed_backend, doubling, known
from .workload import Shape, Workload

NAME = "memory"


@dataclass(frozen=True)
class MemorySettings(LotSettings):
    """Mechanisms and lengths to measure, beside PyTorch's fused softmax."""

    mechanisms: tuple[str, ...] = setting(("lot",), "Mechanisms to measure beside sdpa.")
    min_n: int = setting(2**12, "Shortest sequence.", at_least=1)
    max_n: int = setting(2**17, "Longest sequence; lengths double from --min-n.")
    batch: int = setting(1, "Batch size.", at_least=1)
    heads: int = setting(4, "Number of heads.", at_least=1)
    head_dim: int = setting(64, "Head dimension.", at_least=1)
    time_limit: float = setting(600.0, "Skip calls expected to take longer than this, in seconds.")


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
    experiment: str
    provenance: Provenance
    settings: MemorySettings
    points: tuple[MemoryPoint, ...]


def run(
    settings: MemorySettings, provenance: Provenance, listen: Callable[[str], None] = lambda what: None
) -> MemoryResult:
    """Measure sdpa and every mechanism at every length, forward and backward."""
    lengths = doubling(settings.min_n, settings.max_n)
    alternatives: dict[str, tuple[str, dict[str, Any]]] = {"sdpa": ("sdpa", {})}
    for name in known(settings.mechanisms):
        if name == "lot":
            agreed_backend(settings, heads=settings.heads, head_dim=settings.head_dim, backward=True)
            options = {"rank": settings.rank, **settings.lot_options, "backend": settings.backend}
            alternatives[f"lot r={settings.rank}"] = (name, options)
        else:
            alternatives[name] = (name, {})
    points = []
    for label, (mechanism, options) in alternatives.items():
        last: tuple[Workload, float] | None = None
        for n in lengths:
            shape = Shape(n, settings.batch, settings.heads, settings.head_dim)
            workload = Workload(mechanism, shape, backward=True, options=options, seed=settings.seed)
            skipped = too_large(workload) or too_slow(workload, last, settings.time_limit)
            if skipped:
                point = MemoryPoint(label, n, None, None, skipped)
            else:
                usage = measure([workload], settings.threads)[0]
                last = workload, usage.seconds
                point = MemoryPoint(label, n, usage.saved, usage.peak)
            points.append(point)
            listen(f"Measured {label} at N={n}")
    return MemoryResult(NAME, provenance, settings, tuple(points))


def render(folder: Path) -> Report:
    result = read(MemoryResult, folder / "result.json")
    s = result.settings
    rows = [(p.label, str(p.n), _mebibytes(p.saved_bytes), _mebibytes(p.peak_bytes)) for p in result.points]
    title = f"MiB beyond q, k, v, out and their gradients (B{s.batch} H{s.heads} D{s.head_dim})"
    left_out = [f"{p.label} at N={p.n} was left out: {p.skipped}." for p in result.points if p.skipped]
    return Report(
        (result.provenance.command,),
        (Table(title, ("mechanism", "N", "kept for\nbackward", "peak"), tuple(rows)),),
        (*left_out, f"{result.provenance.where()}."),
    )


def _mebibytes(value: int | None) -> str:
    return "–" if value is None else f"{value / 2**20:.2f}"
