"""A whole model: inference and a training step of DeiT-Tiny with LOT, against timm's with fused softmax.

Inference is that of the folded model (`lotformer.fold`).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lotformer.cli.tables import Table
from lotformer.layers import AttentionLayer
from lotformer.settings import setting

from ..results.plain import read
from ..results.provenance import Provenance
from ..results.report import Report
from .settings import LotSettings, agreed_backend
from .timing import alternate

NAME = "model"

OURS, THEIRS = "lot_deit_tiny_patch16_224", "deit_tiny_patch16_224"
KEYS = "lot_deit_tiny_patch16_224, keys alone"
PARTS = ("attn", "mlp")


@dataclass(frozen=True)
class ModelSettings(LotSettings):
    """Sizes of the images, and how long to measure."""

    sizes: tuple[int, ...] = setting((224, 448, 896), "Sides of the images in pixels.", at_least=16)
    batch: int = setting(1, "Images per batch at sizes that --batches does not reach.", at_least=1)
    batches: tuple[int, ...] = setting((), "Images per batch at each of the sizes.", at_least=1)
    seconds: float = setting(3.0, "Seconds to spend on each call.")


@dataclass(frozen=True)
class ModelPoint:
    """One model at one size. `profile` is the share of a forward pass in attention layers and in MLPs."""

    model: str
    size: int
    tokens: int
    inference_ms: float
    step_ms: float
    profile: dict[str, float]
    batch: int | None = None


@dataclass(frozen=True)
class ModelResult:
    experiment: str
    provenance: Provenance
    settings: ModelSettings
    points: tuple[ModelPoint, ...]


def run(
    settings: ModelSettings, provenance: Provenance, listen: Callable[[str], None] = lambda what: None
) -> ModelResult:
    """Time both models in turns at every size: a forward pass without gradients, and forward, backward and AdamW."""
    agreed_backend(settings, heads=3, head_dim=64, backward=True)
    points = []
    for size, batch in zip_longest(settings.sizes, settings.batches[: len(settings.sizes)], fillvalue=settings.batch):
        models = {name: _model(name, size, settings) for name in (OURS, KEYS, THEIRS)}
        pixels = torch.randn(batch, 3, size, size)
        listen(f"Inference at {size} px")
        ready = {name: model if name == THEIRS else _folded(model) for name, model in models.items()}
        inference = alternate(
            {name: _inference(model, pixels) for name, model in ready.items()}, seconds_each=settings.seconds
        )
        listen(f"Training steps at {size} px")
        steps = alternate({name: _step(model, pixels) for name, model in models.items()}, seconds_each=settings.seconds)
        for name in models:
            points.append(
                ModelPoint(
                    name,
                    size,
                    (size // 16) ** 2 + 1,
                    1e3 * inference[name].best,
                    1e3 * steps[name].best,
                    _profile(ready[name], pixels),
                    batch,
                )
            )
    return ModelResult(NAME, provenance, settings, tuple(points))


def render(folder: Path) -> Report:
    result = read(ModelResult, folder / "result.json")
    by_size: dict[int, dict[str, ModelPoint]] = {}
    for point in result.points:
        by_size.setdefault(point.size, {})[point.model] = point
    rows = []
    for size, found in by_size.items():
        theirs = found[THEIRS]
        for name in (name for name in (OURS, KEYS) if name in found):
            ours = found[name]
            images = "" if ours.batch is None else f"{ours.batch} × "
            alone = ", keys alone" if name == KEYS else ""
            rows.append(
                (
                    f"{images}{size} px, {ours.tokens} tokens{alone}",
                    f"{ours.inference_ms:.0f}",
                    f"{theirs.inference_ms:.0f}",
                    f"{theirs.inference_ms / ours.inference_ms:.2f}×",
                    f"{ours.step_ms:.0f}",
                    f"{theirs.step_ms:.0f}",
                    f"{theirs.step_ms / ours.step_ms:.2f}×",
                    *(f"{100 * point.profile['attn']:.0f} %" for point in (ours, theirs)),
                )
            )
    columns = ("DeiT-Tiny", "LOT,\nms", "softmax,\nms", "gain", "LOT,\nstep ms", "softmax,\nstep ms", "gain",
               "LOT, in\nattention", "softmax, in\nattention")  # fmt: skip
    s = result.settings
    batches = "" if s.batches else f"Batch {s.batch}, "
    notes = (
        "Inference, a training step (forward, backward, AdamW), and the share of a forward pass that attention layers "
        "take, projections included. softmax is timm's DeiT-Tiny with PyTorch's fused kernel.",
        f"{batches}rank {s.rank}, {s.iters} sweeps, fp32. {result.provenance.where()}.",
    )
    return Report((result.provenance.command,), (Table("", columns, tuple(rows)),), notes)


def _model(name: str, size: int, settings: ModelSettings) -> nn.Module:
    from lotformer import models  # noqa: F401  registers ours

    # isort: split
    import timm

    torch.manual_seed(settings.seed)
    if name == THEIRS:
        return timm.create_model(name, img_size=size)
    options = {"rank": settings.rank, **settings.lot_options, "backend": settings.backend}
    if name == KEYS:
        options["balance"] = "keys"
    return timm.create_model(OURS, img_size=size, attention_options=options)


def _folded(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    for layer in [m for m in twin.modules() if isinstance(m, AttentionLayer)]:
        layer.fold()
    return twin


def _inference(model: nn.Module, pixels: Tensor) -> Callable[[], Any]:
    def run() -> Tensor:
        model.eval()
        with torch.no_grad():
            return model(pixels)

    return run


def _step(model: nn.Module, pixels: Tensor) -> Callable[[], Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    labels = torch.zeros(len(pixels), dtype=torch.long)

    def run() -> None:
        model.train()
        F.cross_entropy(model(pixels), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def _profile(model: nn.Module, pixels: Tensor) -> dict[str, float]:
    """Shares of a forward pass by the part of a block, the best of three for each."""
    spent = dict.fromkeys((*PARTS, "all"), float("inf"))
    for _ in range(3):
        seconds = dict.fromkeys((*PARTS, "all"), 0.0)
        handles = []
        for module_name, module in model.named_modules():
            part = module_name.rpartition(".")[2]
            if part in PARTS and module_name.startswith("blocks."):
                handles += _clocked(module, part, seconds)
        start = time.perf_counter()
        _inference(model, pixels)()
        seconds["all"] = time.perf_counter() - start
        for handle in handles:
            handle.remove()
        spent = {name: min(spent[name], seconds[name]) for name in spent}
    return {part: spent[part] / spent["all"] for part in PARTS}


def _clocked(module: nn.Module, part: str, seconds: dict[str, float]) -> list[Any]:
    began = [0.0]

    def before(*_: Any) -> None:
        began[0] = time.perf_counter()

    def after(*_: Any) -> None:
        seconds[part] += time.perf_counter() - began[0]

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
