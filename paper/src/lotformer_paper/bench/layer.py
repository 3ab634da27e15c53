"""A whole attention layer, projections included: LOT in its forms against the same layer with fused softmax."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lotformer.cli.tables import Table
from lotformer.layers import AttentionLayer, LOTAttention
from lotformer.settings import setting

from ..results.plain import read
from ..results.provenance import Provenance
from ..results.report import Report
from .agreement import check_backend
from .settings import SAMPLE, LotSettings, agreed_backend
from .timing import alternate

NAME = "layer"

SHAPES = ((16, 197), (4, 1024), (1, 4096), (1, 16384))
"""Samples and tokens of each."""

SOFTMAX = "softmax"
VARIANTS = ("both", "keys", "input-aware", "keys, input-aware")


@dataclass(frozen=True)
class LayerSettings(LotSettings):
    """Width and heads of the layer, and how long to measure."""

    dim: int = setting(384, "Width of the layer.", at_least=1)
    heads: int = setting(6, "Number of heads.", at_least=1)
    max_n: int = setting(2**14, "Skip shapes with more tokens.")
    seconds: float = setting(1.0, "Seconds to spend on each alternative.")


@dataclass(frozen=True)
class LayerPoint:
    """Milliseconds of the layers by name, on one shape. Folded layers have no backward pass."""

    batch: int
    tokens: int
    forward: dict[str, float]
    both_ways: dict[str, float]


@dataclass(frozen=True)
class LayerResult:
    experiment: str
    provenance: Provenance
    settings: LayerSettings
    lot_backend: str
    points: tuple[LayerPoint, ...]


def run(
    settings: LayerSettings, provenance: Provenance, listen: Callable[[str], None] = lambda what: None
) -> LayerResult:
    """Time all layers in turns on every shape: without gradients, and forward and backward."""
    head_dim = settings.dim // settings.heads
    backend = agreed_backend(settings, heads=settings.heads, head_dim=head_dim, backward=True)
    forms: tuple[dict[str, Any], ...] = ({"balance": "keys"}, {"scores": True}, {"balance": "keys", "scores": True})
    for form in forms:
        check_backend(
            settings.backend, rank=settings.rank, head_dim=head_dim, heads=settings.heads, n=SAMPLE, eps=settings.eps,
            iters=settings.iters, backward=True, **form,
        )  # fmt: skip
    points = []
    for batch, tokens in (shape for shape in SHAPES if shape[1] <= settings.max_n):
        x = torch.randn(batch, tokens, settings.dim, generator=torch.Generator().manual_seed(settings.seed))
        layers = _layers(settings)
        listen(f"{batch} × {tokens} tokens, forward")
        folded = {f"{name}, folded": _folded(layers[name]) for name in ("both", "keys")}
        calls = {name: partial(_forward, layer, x) for name, layer in {**layers, **folded}.items()}
        forward = alternate(calls, seconds_each=settings.seconds)
        listen(f"{batch} × {tokens} tokens, forward and backward")
        both = alternate(
            {name: partial(_both_ways, layer, x) for name, layer in layers.items()}, seconds_each=settings.seconds
        )
        points.append(
            LayerPoint(
                batch,
                tokens,
                {name: 1e3 * timing.best for name, timing in forward.items()},
                {name: 1e3 * timing.best for name, timing in both.items()},
            )
        )
    return LayerResult(NAME, provenance, settings, backend, tuple(points))


def render(folder: Path) -> Report:
    result = read(LayerResult, folder / "result.json")
    s = result.settings
    rows = []
    for point in result.points:
        for direction, times in (("forward", point.forward), ("forward + backward", point.both_ways)):
            base = times[SOFTMAX]
            cells = [
                "–" if name not in times else f"{times[name]:.1f}; {base / times[name]:.2f}×"
                for name in ("both", "keys", "both, folded", "keys, folded", "input-aware", "keys, input-aware")
            ]
            aware = times["keys, input-aware"] / times["keys"]
            rows.append((f"B{point.batch} N{point.tokens}, {direction}", f"{base:.1f}", *cells, f"{aware:.2f}"))
    columns = ("shape", "softmax\nms", "LOT", "keys\nalone", "LOT,\nfolded", "keys alone,\nfolded", "input-aware",
               "keys alone,\ninput-aware", "input-aware\n÷ fixed,\nkeys alone")  # fmt: skip
    title = f"A layer of width {s.dim} with {s.heads} heads, LOT r={s.rank} T={s.iters} ({result.lot_backend})"
    notes = (
        "Milliseconds of the whole layer, projections included, and how many times as fast as with softmax, which is "
        "PyTorch's fused kernel in the same layer.",
        f"fp32, threads: {s.threads}. {result.provenance.where()}.",
    )
    return Report((result.provenance.command,), (Table(title, columns, tuple(rows)),), notes)


def _layers(settings: LayerSettings) -> dict[str, nn.Module]:
    torch.manual_seed(settings.seed)
    layers: dict[str, nn.Module] = {SOFTMAX: AttentionLayer(settings.dim, settings.heads, "softmax")}
    for name in VARIANTS:
        layers[name] = LOTAttention(
            settings.dim,
            settings.heads,
            rank=settings.rank,
            iters=settings.iters,
            eps=settings.eps,
            balance="keys" if "keys" in name else settings.balance,
            pivots="input-aware" if "aware" in name else "fixed",
            backend=settings.backend,
        )
    return layers


def _folded(layer: nn.Module) -> nn.Module:
    twin = copy.deepcopy(layer)
    assert isinstance(twin, AttentionLayer)
    twin.fold()
    return twin


def _forward(layer: nn.Module, x: Tensor) -> Tensor:
    layer.eval()
    with torch.no_grad():
        return layer(x)


def _both_ways(layer: nn.Module, x: Tensor) -> tuple[Tensor | None, ...]:
    layer.train()
    x = x.detach().requires_grad_()
    out = layer(x)
    return torch.autograd.grad(out, [x, *layer.parameters()], torch.ones_like(out))
