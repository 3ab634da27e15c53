"""Table 7: accuracy and time of a step by the number of pivots."""

from __future__ import annotations

from pathlib import Path

from lotformer.cli.tables import Table

from ...results.report import Report
from .ablation import Row, budget_notes, commands, records, top1

NAME = "rank-ablation"

RANKS = (4, 8, 16, 32, 64)
ROWS: dict[str, Row] = {f"r{rank}": Row("lot", {"rank": rank}) for rank in RANKS}
PAPER = {4: (64.5, 64.8, 160.5), 8: (66.4, 74.3, 165.3), 16: (68.8, 90.2, 183.4), 32: (74.8, 122.1, 227.8),
         64: (73.9, 183.4, 244.6)}  # fmt: skip
"""Top-1 of DeiT-Tiny on ImageNet-1K, forward and backward milliseconds of a step on 4 GPUs."""


def render(folder: Path) -> Report:
    """The table of the ranks that are finished; the paper's numbers in brackets."""
    found = records(NAME, list(ROWS), folder)
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
    notes = (
        *budget_notes(found),
        "In brackets: the paper, DeiT-Tiny on ImageNet-1K and 4 GPUs. Times are of one training step of the whole "
        "model, best of several, and of little worth where the machine was shared.",
    )
    return Report(commands(found), (Table("Pivots, accuracy and time of a step", columns, tuple(rows)),), notes)
