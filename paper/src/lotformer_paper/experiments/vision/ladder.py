"""Table 3: what each part of LOT attention adds in a small ViT, beside PolaFormer, FLatten and softmax."""

from __future__ import annotations

from typing import Any

from lotformer.cli.tables import Table, mean_and_deviation

from ...results.report import largest
from .ablation import Found, Row, ablation, top1

_PLAIN: dict[str, Any] = {"polarize_prefix": False, "local_conv": None}
_FULL: dict[str, Any] = {"polarize_prefix": True, "local_conv": "2d"}

ROWS: dict[str, Row] = {
    "lot-full": Row("lot", _PLAIN, {"softmax_prefix": False}),
    "lot-cls": Row("lot", _PLAIN),
    "lot-cls-pola": Row("lot", {"polarize_prefix": True, "local_conv": None}),
    "lot-cls-pola-dwc": Row("lot", _FULL),
    "softmax": Row("softmax"),
    "polaformer": Row("polaformer", {"local_conv": False}),
    "polaformer-dwc": Row("polaformer", {"local_conv": True}),
    "flatten": Row("flatten", {"local_conv": False}),
    "flatten-dwc": Row("flatten", {"local_conv": True}),
    "lot-cls-pola-dwc-newton": Row("lot", {**_FULL, "solver": "newton"}),
    "lot-cls-pola-dwc-keys": Row("lot", {**_FULL, "balance": "keys"}),
    "lot-cls-pola-dwc-none": Row("lot", {**_FULL, "balance": "none"}),
}

TITLES = {
    "lot-full": "LOT, all tokens coupled",
    "lot-cls": "LOT, [CLS] reads by softmax",
    "lot-cls-pola": "… and its scores are polarised",
    "lot-cls-pola-dwc": "… and patches are convolved: full LOT",
    "lot-cls-pola-dwc-newton": "full LOT, solved exactly",
    "lot-cls-pola-dwc-keys": "full LOT, only columns balanced",
    "lot-cls-pola-dwc-none": "full LOT, nothing balanced",
    "softmax": "softmax",
    "polaformer": "PolaFormer",
    "polaformer-dwc": "PolaFormer + convolution",
    "flatten": "FLatten",
    "flatten-dwc": "FLatten + convolution",
}

PAPER = {
    "lot-full": 68.2,
    "lot-cls": 73.2,
    "lot-cls-pola": 73.6,
    "lot-cls-pola-dwc": 74.8,
    "softmax": 72.2,
    "polaformer": 61.9,
    "polaformer-dwc": 74.6,
    "flatten": 71.8,
    "flatten-dwc": 74.1,
}
"""Top-1 of DeiT-Tiny on ImageNet-1K after 400 epochs."""


def _tables(found: Found) -> list[Table]:
    columns = (
        "attention", "top-1 %", "top-5 %", "seeds", "column\nresidual", "minutes", "images/s", "paper's\ntop-1 %",
    )  # fmt: skip
    rows = []
    for slug, made in found.items():
        cells = [record.cell for record in made]
        minutes = [cell.minutes for cell in cells if cell.minutes is not None]
        rows.append(
            (
                TITLES[slug],
                top1(made),
                mean_and_deviation([cell.top5 for cell in cells], 100),
                str(len(cells)),
                largest(cell.residual for cell in cells),
                f"{sum(minutes) / len(minutes):.1f}" if minutes else "–",
                f"{sum(cell.images_per_second for cell in cells) / len(cells):.0f}",
                f"{PAPER[slug]:.1f}" if slug in PAPER else "–",
            )
        )
    return [Table("Accuracy of a small ViT by its attention", columns, tuple(rows))]


_NOTES = (
    "Accuracy on the validation images after the last step; mean ± standard deviation where there are several "
    "seeds. A row that begins with … adds to the one above it.",
    "Column residual: how far the worst column of any LOT layer is from the sum imposed on it, relative, on one "
    "batch. Where nothing is balanced no sum is imposed, and it says how uneven the columns are.",
    "The paper's top-1 is of DeiT-Tiny on ImageNet-1K after 400 epochs: compare the order of the rows, not the "
    "numbers. Minutes, of training and evaluation, and images per second are of a shared machine and say little.",
)

EXPERIMENT = ablation(
    "vision-ladder",
    "Table 3: what each part of LOT adds in a small ViT, beside PolaFormer, FLatten and softmax.",
    ROWS,
    _tables,
    _NOTES,
    order=TITLES,
    seeds=2,
)
