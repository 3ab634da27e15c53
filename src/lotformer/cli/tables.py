"""Tables as data: shown in a terminal and written as Markdown from the same cells."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Rows of text below a header. `left` is how many leading columns are aligned left; numbers follow.

    A header may have several lines; in Markdown they are joined.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 1

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row has {len(row)} cells, the table {len(self.columns)} columns: {row}.")

    def markdown(self) -> str:
        header = [column.replace("-\n", "").replace("\n", " ") for column in self.columns]
        rule = ["---" if index < self.left else "---:" for index in range(len(header))]
        lines = ["| " + " | ".join(cells) + " |" for cells in (header, rule, *self.rows)]
        return "\n".join([*([self.title, ""] if self.title else []), *lines])


def mean_and_deviation(values: Sequence[float], scale: float = 1.0, digits: int = 1) -> str:
    """`71.2 ± 0.4`; the deviation only where there are several values, and a dash where there is none."""
    if not values:
        return "–"
    mean = f"{scale * statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {scale * statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean
