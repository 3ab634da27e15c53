"""The rows of the table: what may take the place of softmax in the encoder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..forms import AWARE, NEAR, TRANSPORT


@dataclass(frozen=True)
class Row:
    """A row of the table: a mechanism, its options, and whether it has parameters that can be calibrated."""

    mechanism: str
    options: dict[str, Any] = field(default_factory=dict)
    calibrated: bool = False


_PAPER = {
    **TRANSPORT,
    "rank": 32,
    "eps": 1.0,
    "solver": "sinkhorn",
    "iters": 5,
    "key_masses": "uniform",
    "pivot_init": "unit",
}

ROWS: dict[str, Row] = {
    "softmax": Row("softmax"),
    "sinkformer": Row("sinkformer"),
    "espformer": Row("espformer"),
    "lot": Row("lot", _PAPER, calibrated=True),
    "lot-exact": Row("lot", TRANSPORT, calibrated=True),
    "lot-aware": Row("lot", AWARE, calibrated=True),
    "lot-near": Row("lot", NEAR, calibrated=True),
}
"""`lot` is the paper's: 32 random pivots, ε = 1, five sweeps, uniform masses. `lot-exact` is transport at ε = 0.1,
solved to rounding, with learned key masses; `lot-aware` the same with pivots that see the input; `lot-near`
reads the nearest tokens by softmax as well. All balance both sides."""
