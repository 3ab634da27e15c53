"""Masses of the keys as a function of the input: what a converted checkpoint needs for its attention sinks."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor, nn

from .. import ops
from ..ops.plain.masses import mass_directions, masses_of, mean_of_real
from .undecayed import Undecayed

__all__ = ["KeyMassKind", "KeyMasses", "masses_of", "mean_of_real"]

KeyMassKind = Literal["uniform", "linear", "query-aware"]


class KeyMasses(nn.Module):
    """Learned key masses `p2_j ∝ exp(w_h·k_j + α_h k_j·q̄ / √D)`, q̄ the mean of the real queries.

    "uniform" is the doubly stochastic case and returns None, "linear" drops the query-aware term. `w` starts at 0
    and `α` at 1: "linear" starts uniform, "query-aware" at the keys' mean softmax logit.
    """

    def __init__(self, num_heads: int, head_dim: int, kind: KeyMassKind = "uniform") -> None:
        super().__init__()
        if kind not in get_args(KeyMassKind):
            known = ", ".join(map(repr, get_args(KeyMassKind)))
            raise ValueError(f"key_masses must be one of {known}, got {kind!r}.")
        self.kind = kind
        self.direction = Undecayed(num_heads, head_dim) if kind != "uniform" else None
        self.query_weight = Undecayed(num_heads) if kind == "query-aware" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.direction is not None:
            nn.init.zeros_(self.direction.bias)
        if self.query_weight is not None:
            nn.init.ones_(self.query_weight.bias)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        *,
        backend: str | None = None,
    ) -> Tensor | None:
        """Masses `(B, H, M)` for queries `(B, H, N, D)` and keys `(B, H, M, D)`, sum 1 over real keys."""
        if self.direction is None:
            return None
        weight = None if self.query_weight is None else self.query_weight(k)
        return ops.key_masses(
            None if weight is None else q, k, self.direction(k), weight, query_mask, key_mask, backend=backend
        )

    def directions(self, like: Tensor, mean_query: Tensor | None) -> Tensor:
        """The direction that turns the keys of a head into logits, `w + α q̄ / √D`: `(B or 1, H, D)`."""
        assert self.direction is not None
        weight = None if self.query_weight is None else self.query_weight(like)
        return mass_directions(self.direction(like), weight, mean_query)

    def extra_repr(self) -> str:
        return f"kind={self.kind!r}"
