"""The result of one call of the operator: its output and, on request, its residual and its plans."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import reference
from .convergence import tolerated
from .coupling import Coupling
from .problem import Potentials, Result, Solve, Transport


@dataclass(eq=False, repr=False, slots=True)  # not frozen: that would cost a small call 2 %
class Solution:
    """The output of `solve_attention`; the rest is computed when it is asked for, without gradients.

    Attributes:
        out: `(B, H, N, Dv)`, what `lot_attention` returns.
        transport, solve: what was solved, and how.
        backend: which implementation ran.
    """

    out: Tensor
    transport: Transport
    solve: Solve
    backend: str
    _result: Result | None = None  # None where there was nothing to solve

    def __repr__(self) -> str:
        return f"Solution(out={tuple(self.out.shape)} {self.out.dtype}, backend={self.backend!r})"

    @property
    def residual(self) -> Tensor:
        """`ρ (B, H)` that the solve has reached.

        A column of A misses its sum by at most `2ρ / (1 - ρ)` of it, if ρ < 1. It is 0 for samples without
        queries or without keys, and where nothing is imposed.
        """
        if self._result is None:
            q = self.transport.q
            return q.new_zeros(q.shape[:2], dtype=reference.solve_dtype(q))
        return self._result.residual()

    @property
    def converged(self) -> Tensor:
        """Boolean `(B, H)`: whether the residual is small enough to go without the warning of an exact solve.

        That is up to `100 · tol`, which rounding may take, and never less than 1e-3.
        """
        return self.residual <= tolerated(self.solve)

    def coupling(self) -> Coupling:
        """The plans that made the output."""
        with torch.no_grad():
            potentials = None if self._result is None else self._result.potentials()
            return coupling_of(self.transport, self.solve, self.backend, potentials)


def coupling_of(transport: Transport, solve: Solve, backend: str, potentials: Potentials | None = None) -> Coupling:
    """The plans of the given potentials, or else those that the definition finds."""
    query_plan, key_plan = reference.plans(transport, solve, potentials)
    sent_by, received_by = reference.query_masses(transport), reference.key_masses(transport)
    masses = reference.log_pivot_masses(transport, solve)[:, 0].exp()
    if solve.balance != "both":
        masses = (sent_by[..., None] * query_plan).sum(-2)
    if solve.balance == "none":
        received_by = (key_plan @ masses[..., None])[..., 0]
    return Coupling(
        query_plan=query_plan,
        key_plan=key_plan,
        masses=masses,
        query_masses=sent_by,
        key_masses=received_by,
        key_mask=transport.key_mask,
        backend=backend,
    )
