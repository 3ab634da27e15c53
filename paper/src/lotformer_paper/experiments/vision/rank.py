"""Table 7: accuracy and time of a step by the number of pivots."""

from __future__ import annotations

from lotformer.cli.tables import Table

from .ablation import Found, Row, ablation, top1

RANKS = (4, 8, 16, 32, 64)
ROWS: dict[str, Row] = {f"r{rank}": Row("lot", {"rank": rank}) for rank in RANKS}
PAPER = {4: (64.5, 64.8, 160.5), 8: (66.4, 74.3, 165.3), 16: (68.8, 90.2, 183.4), 32: (74.8, 122.1, 227.8),
         64: (73.9, 183.4, 244.6)}  # fmt: skip
"""Top-1 of DeiT-Tiny on ImageNet-1K, forward and backward milliseconds of a step on 4 GPUs."""


def _tables(found: Found) -> list[Table]:
    """The ranks that are finished; the paper's numbers in brackets."""
    rows = []
    for rank in RANKS:
        made = found.get(f"r{rank}")
        if made is None:
            continue
        accuracy, forward, backward = PAPER[rank]
        best = [min(getattr(record.cell, part) for record in made) for part in ("forward_ms", "backward_ms")]
        rows.append(
            (
                f"r = {rank}",
                f"{top1(made)} ({accuracy:.1f})",
                f"{best[0]:.0f} ({forward:.0f})",
                f"{best[1]:.0f} ({backward:.0f})",
            )
        )
    columns = ("pivots", "top-1 %", "forward ms", "backward ms")
    return [Table("Pivots, accuracy and time of a step", columns, tuple(rows))]


_NOTES = (
    "In brackets: the paper, DeiT-Tiny on ImageNet-1K and 4 GPUs. Times are of one training step of the whole "
    "model on at most 64 images, best of several, and of little worth where the machine was shared.",
)

EXPERIMENT = ablation(
    "rank-ablation", "Table 7: accuracy, and time of a step, by the number of pivots.", ROWS, _tables, _NOTES
)
