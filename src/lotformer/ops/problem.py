"""One call of the operator in two halves: what is transported, and how the transport is solved.

Everything below `lot_attention` takes these two. A field is stated here and nowhere else: a new option of the solver is
one more field of `Solve`, with its check in `checks`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Solver = Literal["sinkhorn", "newton"]

SOLVERS = get_args(Solver)

Balance = Literal["both", "keys", "none"]
"""The marginals imposed beside unit rows: the pivots' masses on the queries and the keys' masses on the keys, the
keys' alone, or neither. See `reference`."""

BALANCES = get_args(Balance)

LEAST_LOG_MASS: dict[Solver, float] = {"sinkhorn": -1e4, "newton": -60.0}
"""Lighter pivots count as this light, which is nothing next to 1 in any precision. Sweeps only need it finite; the
exact solver looks at the relative error of every pivot, which has no meaning for masses that underflow."""


class Transport(NamedTuple):
    """The measures: tokens, values, the pivots between them, and all masses. Shapes: `lot_attention`.

    Without pivots, `q (B, H, N, R)` and `k (B, H, M, R)` are the scores of the tokens themselves.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    pivots: Tensor | None
    log_masses: Tensor
    query_mask: Tensor | None = None
    key_mask: Tensor | None = None
    query_masses: Tensor | None = None
    key_masses: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int, int, int, int]:
        """`(B, H, N, M, R, D, Dv)`; given scores, D is R."""
        batch, heads, n, d = self.q.shape
        return batch, heads, n, self.k.shape[2], self.rank, d, self.v.shape[3]

    @property
    def rank(self) -> int:
        """R, the number of pivots."""
        return self.q.shape[3] if self.pivots is None else self.pivots.shape[-2]

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to send, or nothing to receive."""
        return self.q.shape[2] == 0 or self.k.shape[2] == 0


class Solve(NamedTuple):
    """The solve: the temperature of the scores, the solver with its stopping rule, and the marginals to impose."""

    eps: float | Tensor = 1.0
    solver: Solver = "sinkhorn"
    iters: int = 5
    tol: float | None = 1e-6
    scale: float | None = None
    balance: Balance = "both"

    def temperature(self, dim: int) -> float | Tensor:
        """The factor of the scores of tokens of dimension `dim`: `scale / eps`, a number or one per head."""
        return (dim**-0.5 if self.scale is None else self.scale) / self.eps


Potentials = tuple[Tensor, Tensor]
"""`g (B, H, R)` of the queries and of the keys, up to a constant: what the plans in `reference` are made of. Where
a side is not solved, `log m` for the queries and anything for the keys."""


class Result(NamedTuple):
    """The output `(B, H, N, Dv)` of a backend and what can be asked about its solve, at a price and without gradients.

    Attributes:
        residual: `ρ (B, H)`, as defined by `reference.residual`.
        potentials: those that the backend used.
    """

    out: Tensor
    residual: Callable[[], Tensor]
    potentials: Callable[[], Potentials]


Run = Callable[[Transport, Solve], Result]
"""The signature of a backend."""


def is_traced(x: Tensor) -> bool:
    """True if the numbers in `x` cannot be read: under compile, export, a functorch transform, or a fake mode."""
    return (
        torch.compiler.is_compiling()
        or torch._C._functorch.maybe_current_level() is not None
        or isinstance(x, torch._subclasses.FakeTensor)
    )
