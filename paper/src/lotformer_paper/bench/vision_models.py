"""Parameters and multiply-adds of the vision models, beside the paper's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lotformer.cli.tables import Table

from ..results.plain import read
from ..results.provenance import Provenance
from ..results.report import Report
from .settings import BenchSettings

NAME = "vision-models"

PAPER = {
    "lot_deit_tiny_patch16_224": (5.8, 1.2),
    "lot_deit_small_patch16_224": (22.3, 4.8),
    "lot_pvt_tiny": (12.2, 2.1),
    "lot_swin_tiny": (28.0, 4.5),
}
"""Millions of parameters, and what the paper calls GFLOPs: 10⁹ multiply-adds."""

SOFTMAX = {
    "lot_deit_tiny_patch16_224": "deit_tiny_patch16_224",
    "lot_deit_small_patch16_224": "deit_small_patch16_224",
    "lot_swin_tiny": "swin_tiny_patch4_window7_224",
}
"""The same architectures with softmax attention, as timm has them."""


@dataclass(frozen=True)
class VisionModelsSettings(BenchSettings):
    """Nothing but what every benchmark needs: the models and their sizes are the paper's."""


@dataclass(frozen=True)
class ModelCount:
    name: str
    parameters: int
    macs: float


@dataclass(frozen=True)
class VisionModelsResult:
    experiment: str
    provenance: Provenance
    settings: VisionModelsSettings
    counts: tuple[ModelCount, ...]


def run(
    settings: VisionModelsSettings, provenance: Provenance, listen: Callable[[str], None] = lambda what: None
) -> VisionModelsResult:
    """Count the paper's four models and their softmax twins at 224 px."""
    from lotformer import models  # noqa: F401  registers them

    # isort: split
    import timm

    from lotformer.models.complexity import complexity

    counts = []
    for name in (*PAPER, *SOFTMAX.values()):
        listen(f"Counting {name}")
        counted = complexity(timm.create_model(name))
        counts.append(ModelCount(name, counted.parameters, counted.macs))
    return VisionModelsResult(NAME, provenance, settings, tuple(counts))


def render(folder: Path) -> Report:
    result = read(VisionModelsResult, folder / "result.json")
    counts = {count.name: count for count in result.counts}
    rows = []
    for name, (millions, giga) in PAPER.items():
        ours, twin = counts[name], counts.get(SOFTMAX.get(name, ""))
        rows.append(
            (
                name,
                *_beside(ours.parameters / 1e6, millions),
                *_beside(ours.macs / 1e9, giga),
                "–" if twin is None else f"{twin.parameters / 1e6:.2f}",
                "–" if twin is None else f"{twin.macs / 1e9:.2f}",
            )
        )
    columns = ("model at 224 px", "M para-\nmeters", "paper", "off by", "G mul-\ntiply-adds", "paper", "off by",
               "softmax:\nM", "softmax:\nG")  # fmt: skip
    notes = (
        "Multiply-adds of products and convolutions; element-wise work (exponentials, Sinkhorn's sweeps) is left out.",
        "lot_pvt_tiny lacks the learned positions that FLatten and PolaFormer add to the keys of every PVT block: "
        "2·(3136·64 + 784·128 + 196·320 + 50·512) = 0.78 M parameters, with which it would have 12.22 M. They would "
        "tie it to one size of images.",
        "The paper's multiply-adds of DeiT lie above those of softmax. Counted as here, 197 tokens and 32 pivots need "
        "fewer than softmax (four products of N·r·D against two of N²·D), so the paper probably counts more.",
        f"{result.provenance.where()}.",
    )
    return Report((result.provenance.command,), (Table("", columns, tuple(rows)),), notes)


def _beside(ours: float, paper: float) -> tuple[str, str, str]:
    return f"{ours:.2f}", f"{paper:.1f}", f"{100 * (ours / paper - 1):+.1f} %"
