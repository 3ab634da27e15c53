"""What the paper prints: the rows of its Tables 1 and 2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BACKBONES = {
    "lot_deit_tiny_patch16_224": "DeiT-Tiny",
    "lot_deit_small_patch16_224": "DeiT-Small",
    "lot_pvt_tiny": "PVT-Tiny",
    "lot_swin_tiny": "Swin-Tiny",
}

MECHANISMS = {
    "softmax": "softmax",
    "efficient": "Efficient",
    "hydra": "Hydra",
    "enhanced": "Enhanced",
    "flatten": "FLatten",
    "angular": "Angular",
    "mobiattention": "MobiAttention",
    "polaformer": "PolaFormer",
    "sinkformer": "Sinkformer",
    "espformer": "ESPFormer",
    "lot": "LOTFormer",
}


@dataclass(frozen=True)
class Row:
    """A row of Table 1: what is built, and what the paper prints.

    Attributes:
        parameters, macs: in millions, and 10⁹ multiply-adds.
        top1: per cent, on ImageNet-1K after 400 epochs.
    """

    backbone: str
    attention: str
    parameters: str
    macs: str
    top1: str


TABLE_1 = tuple(
    Row(backbone, *row.split())
    for backbone, rows in {
        "lot_deit_tiny_patch16_224": (
            "softmax 5.7 1.1 72.2", "efficient 5.7 1.1 70.2", "hydra 5.7 1.1 68.3", "enhanced 5.8 1.1 72.9",
            "flatten 6.1 1.1 74.1", "angular 5.7 1.1 70.8", "mobiattention 5.7 1.2 73.3", "polaformer 6.1 1.2 74.6",
            "sinkformer 5.7 1.2 70.2", "espformer 5.7 1.2 70.1", "lot 5.8 1.2 74.8",
        ),
        "lot_deit_small_patch16_224": ("softmax 22 4.6 79.8", "polaformer 23 4.8 79.8", "lot 22.3 4.8 80.1"),
        "lot_pvt_tiny": ("softmax 13.0 1.9 75.1", "polaformer 12.0 2.0 78.8", "lot 12.2 2.1 79.6"),
        "lot_swin_tiny": (
            "softmax 28.0 4.4 81.2", "hydra 29.0 4.5 80.7", "efficient 29.0 4.5 81.0", "angular 29.0 4.5 79.4",
            "enhanced 29.0 4.5 81.8", "flatten 29.0 4.5 82.1", "polaformer 29.0 4.5 82.6", "lot 28.0 4.5 81.8",
        ),
    }.items()
    for row in rows
)  # fmt: skip

TABLE_2: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "softmax": ("Transformer", ("61.55", "38.71", "80.93", "70.39", "39.14")),
    "local": ("LocalAttn", ("52.98", "15.82", "53.39", "66.63", "41.46")),
    "linear-transformer": ("LinearTrans.", ("65.90", "16.13", "53.09", "75.30", "42.34")),
    "reformer": ("Reformer", ("56.10", "37.27", "53.40", "68.50", "38.07")),
    "performer": ("Performer", ("65.40", "18.01", "53.82", "77.05", "42.77")),
    "synthesizer": ("Synthesizer", ("61.68", "36.99", "54.67", "69.45", "41.61")),
    "longformer": ("Longformer", ("62.85", "35.63", "56.89", "69.71", "42.22")),
    "informer": ("Informer", ("62.13", "37.05", "79.35", "56.44", "37.86")),
    "bigbird": ("Bigbird", ("64.02", "36.05", "59.29", "74.87", "40.83")),
    "linformer": ("Linformer", ("57.29", "36.44", "77.85", "65.39", "38.43")),
    "kernelized": ("Kernelized", ("60.02", "38.46", "82.11", "69.86", "32.63")),
    "cosformer": ("Cosformer", ("63.54", "37.20", "80.28", "70.00", "35.84")),
    "nystromformer": ("Nystrom", ("62.36", "37.95", "80.89", "69.34", "38.94")),
    "skyformer": ("Skyformer", ("64.70", "38.69", "82.06", "70.73", "40.77")),
    "hedgehog": ("Hedgehog", ("64.60", "37.15", "82.24", "74.16", "40.15")),
    "polaformer": ("PolaFormer, α = 3", ("59.50", "38.80", "79.50", "67.50", "42.00")),
    "polaformer+dwc": ("PolaFormer†, α = 3", ("73.06", "37.35", "80.50", "70.53", "42.15")),
    "deltanet": ("DeltaNet", ("74.34", "38.16", "83.51", "73.37", "36.55")),
    "mamba2": ("Mamba2", ("78.11", "37.86", "82.66", "70.14", "42.28")),
    "lot": ("LOTFormer", ("65.2", "38.5", "80.4", "73.2", "45.7")),
    "lot+dwc": ("LOTFormer†", ("71.1", "38.5", "80.9", "69.9", "54.1")),
}
"""The rows of Table 2: their names there, and accuracy on Text, ListOps, Retrieval, Pathfinder and Image."""
