"""Inputs of the kernels."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """Inputs of the kernels: `z` are pivots times `scale / eps`, `log_m` and `log_a` normalised, all fp32.

    q `(B,H,N,D)`, k `(B,H,M,D)`, v `(B,H,M,Dv)`, z `(H,R,D)` or `(B,H,R,D)`, log_m `(H,R)`; log masses
    `(B, 1 or H, N or M)` or None for uniform ones; validity as uint8, `(B,1,N)` and `(B, 1 or H, M)`, or None; `tol`
    None for a fixed cost. If q and k are scores, D is R and z is `scale / eps (H,)`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    z: Tensor
    log_m: Tensor
    query_log_a: Tensor | None
    key_log_a: Tensor | None
    query_valid: Tensor | None
    key_valid: Tensor | None
    newton: bool
    iters: int
    tol: float | None
    balance: str

    @property
    def heads(self) -> int:
        return self.q.shape[0] * self.q.shape[1]

    @property
    def rank(self) -> int:
        return self.log_m.shape[1]

    @property
    def slots(self) -> tuple[int, int]:
        """The numbers of potentials kept of the queries and of the keys; `fused` selects them."""
        solved = 2 if self.newton else self.iters + 1
        return {"both": (solved, solved), "keys": (2, solved), "none": (1, 1)}[self.balance]

    @property
    def plan_slots(self) -> tuple[int, int]:
        """The slots that the two plans are made of; -1 for keys that are not solved."""
        queries, keys = self.slots
        return queries - 1 if self.balance == "both" else 0, keys - 2

    @property
    def depth(self) -> int | None:
        """Of a token; None if scores are given."""
        return None if self.z.dim() == 1 else self.z.shape[-1]
