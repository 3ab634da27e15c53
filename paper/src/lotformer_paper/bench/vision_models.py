"""Parameters and multiply-adds of the models of Table 1, beside the paper's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lotformer.cli.tables import Table

from ..results.paper import BACKBONES, MECHANISMS, TABLE_1
from ..results.plain import read
from ..results.provenance import Provenance
from ..results.report import Report
from .settings import BenchSettings

NAME = "vision-models"

_PRODUCTS = (
    "Without the two products of the attention, which a counter of layers does not see, it would be 1.08 G: the "
    "paper's 1.1. Its 4.6 G of DeiT-Small has them."
)
_GATE = (
    "PolaFormer's published gate is a linear map of the layer's input, of C² weights; ours is one of each head's "
    "queries, C·D. The paper's parameters fit a model with positions and no gate at all (6.19, 22.98, 12.15 and "
    "29.19 M), its 4.8 G of DeiT-Small the published gate (4.85 G)."
)
_UNSEEN = "Without the products of the attention it would be 2.00 G: the paper's 2.0."
_SLICES = (
    "ESPFormer multiplies two N×N matrices for every channel, which is most of this. The paper's 1.2 G is what softmax "
    "takes, and leaves no room for them."
)
_LOT = (
    "LOT takes four products of N·r·D, softmax two of N²·D: with 197 tokens and 32 pivots it must lie below softmax. "
    "Element-wise work does not make the difference: eleven half-steps over both plans are 0.01 G."
)
_PVT_POSITIONS = (
    "FLatten's PVT, which other authors build on, adds positions to the keys of all blocks: 2·(3136·64 + 784·128 + "
    "196·320 + 50·512) = 0.78 M, with which LOT would have 12.22 M. LOT as defined has none."
)
_SWIN_POSITIONS = (
    "28.29 M is the original Swin. FLatten's Swin adds positions to the keys of the first two stages, 2·(3136·96 + "
    "784·192) = 0.90 M: 29.19 M, so the paper's rows seem to be of that host. These mechanisms as defined have none."
)

WHY: dict[tuple[str, str], tuple[str, ...]] = {
    ("lot_deit_tiny_patch16_224", "softmax"): (_PRODUCTS,),
    ("lot_deit_tiny_patch16_224", "polaformer"): (_GATE,),
    ("lot_deit_tiny_patch16_224", "espformer"): (_SLICES,),
    ("lot_deit_small_patch16_224", "polaformer"): (_GATE,),
    ("lot_deit_small_patch16_224", "lot"): (_LOT,),
    ("lot_pvt_tiny", "polaformer"): (_GATE, _UNSEEN),
    ("lot_pvt_tiny", "lot"): (_PVT_POSITIONS,),
    **{("lot_swin_tiny", name): (_SWIN_POSITIONS,) for name in ("hydra", "efficient", "angular", "enhanced")},
}
"""Reasons for rows that differ from the paper's by more than 2 %."""


@dataclass(frozen=True)
class VisionModelsSettings(BenchSettings):
    """Nothing but what every benchmark needs: the models and their sizes are the paper's."""


@dataclass(frozen=True)
class ModelCount:
    backbone: str
    attention: str
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
    """Count every row of Table 1 at 224 px."""
    from lotformer import models  # noqa: F401  registers them

    # isort: split
    import timm

    from lotformer.models.complexity import complexity

    counts = []
    for row in TABLE_1:
        listen(f"Counting {BACKBONES[row.backbone]} with {MECHANISMS[row.attention]}")
        counted = complexity(timm.create_model(row.backbone, attention=row.attention))
        counts.append(ModelCount(row.backbone, row.attention, counted.parameters, counted.macs))
    return VisionModelsResult(NAME, provenance, settings, tuple(counts))


def agrees(ours: float, printed: str) -> bool:
    """True if a count is within 2 % of a number that the paper may have rounded."""
    decimals = len(printed.partition(".")[2])
    half = 0.5 * 10**-decimals
    return 0.98 * (float(printed) - half) <= ours <= 1.02 * (float(printed) + half)


def render(folder: Path) -> Report:
    result = read(VisionModelsResult, folder / "result.json")
    counts = {(count.backbone, count.attention): count for count in result.counts}
    reasons = list(dict.fromkeys(reason for found in WHY.values() for reason in found))
    columns = ("attention", "M para-\nmeters", "paper", "off by", "G mul-\ntiply-adds", "paper", "off by", "see")
    tables = []
    for backbone, title in BACKBONES.items():
        rows = []
        for row in TABLE_1:
            count = counts.get((backbone, row.attention))
            if row.backbone == backbone and count is not None:
                letters = [_letter(reasons.index(reason)) for reason in WHY.get((backbone, row.attention), ())]
                rows.append(
                    (
                        MECHANISMS[row.attention],
                        *_beside(count.parameters / 1e6, row.parameters),
                        *_beside(count.macs / 1e9, row.macs),
                        ", ".join(letters) or "–",
                    )
                )
        tables.append(Table(f"{title} at 224 px", columns, tuple(rows)))
    notes = (
        "Multiply-adds of products and convolutions; element-wise work (exponentials, Sinkhorn's sweeps) is left out. "
        "LOT is counted as defined; it runs with fewer, as it need not form queries and keys.",
        "These are all 25 rows of the paper's Table 1. A row without a letter is within 2 % of what rounds to the "
        "paper's numbers.",
        "Softmax: timm's DeiT and Swin, and PVT with its reduced keys. Other mechanisms mix whole maps, in Swin those "
        "of the first two stages; FLatten and PolaFormer have positions of keys; LOT is `lotformer.models`' default.",
        *(f"{_letter(index)}: {reason}" for index, reason in enumerate(reasons)),
        f"{result.provenance.where()}.",
    )
    return Report((result.provenance.command,), tuple(tables), notes)


def _beside(ours: float, printed: str) -> tuple[str, str, str]:
    return f"{ours:.2f}", printed, f"{100 * (ours / float(printed) - 1):+.1f} %"


def _letter(index: int) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[index]
