"""The rows of the arena's tables: mechanisms of the registry, and LOT set in other ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lotformer import attention
from lotformer.cli.tables import Table

from ...results.paper import TABLE_2

MIXED = "+dwc"
"""Ends the name of a row that adds a depthwise convolution of the values."""
ALL = "paper"
"""Stands for all rows of the paper's Table 2."""
PAPERS_TASKS = ("text", "listops", "retrieval", "pathfinder", "image")
"""In the order of that table."""


@dataclass(frozen=True)
class Row:
    """A mechanism, its options over those of the recipe, and how the model pools. `meaning` explains it in a legend."""

    attention: str
    options: tuple[str, ...] = ()
    pooling: Literal["real", "learned"] = "real"
    meaning: str = ""


_WIDE = ("rank=32", "eps=1.0", "mass_temperature=1.0")

VARIANTS: Mapping[str, Row] = {
    "lot": Row("lot", meaning="LOT with the paper's five sweeps"),
    "lot-exact": Row("lot", ("solver=newton",), meaning="the same couplings solved exactly"),
    "lot-semibalanced": Row("lot", ("balance=keys",), meaning="only the column sums imposed"),
    "lot-unbalanced": Row("lot", ("balance=none",), meaning="no sums imposed beside unit rows"),
    "lot-wide": Row("lot", _WIDE, meaning="32 pivots at ε = 1"),
    "lot-wide-pooled": Row(
        "lot", _WIDE, pooling="learned", meaning="lot-wide in a model that pools by learned weights"
    ),
    "lot-masses": Row("lot", (*_WIDE, "key_masses=linear"), meaning="lot-wide with learned masses of the keys"),
    "softmax-pooled": Row("softmax", pooling="learned", meaning="softmax in a model that pools by learned weights"),
}
"""A mean over tokens cannot see a doubly stochastic matrix: Σ_i A_ij v_j is Σ_j v_j. Learned key masses keep the
coupling exact and give the columns other sums; a pooling by learned weights keeps unit columns.
"""


def row_named(name: str) -> Row:
    """The row of this name, with or without `+dwc`.

    Raises:
        ValueError: there is no such mechanism.
    """
    name = name.removesuffix(MIXED)
    return VARIANTS.get(name) or Row(attention.entry(name).name)


def as_printed(rows: Sequence[str], columns: Mapping[str, str]) -> list[Table]:
    """Those of the rows that the paper has, by their names and with their numbers there; `columns` by task."""
    shown = []
    for row in (row for row in rows if row in TABLE_2):
        title, accuracies = TABLE_2[row]
        found = dict(zip(PAPERS_TASKS, accuracies, strict=True))
        shown.append((row, title, *(found[task] for task in columns)))
    header = ("Attention", "in the paper", *columns.values())
    return [Table("The paper's test accuracy, %", header, tuple(shown), left=2)] if shown and columns else []
