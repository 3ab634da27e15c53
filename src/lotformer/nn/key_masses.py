"""Masses of the keys as a function of the input: what a converted checkpoint needs for its attention sinks."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ..ops import cpu
from ..ops.precision import no_autocast
from .undecayed import Undecayed

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
        self, q: Tensor, k: Tensor, key_mask: Tensor | None = None, query_mask: Tensor | None = None
    ) -> Tensor | None:
        """Masses `(B, H, M)` for queries `(B, H, N, D)` and keys `(B, H, M, D)`, sum 1 over real keys."""
        if self.direction is None:
            return None
        if cpu.can_weigh_keys(q, k, self.direction.bias):
            return self._native(q, k, key_mask, query_mask)
        with no_autocast(k.device.type):
            mean_query = None if self.query_weight is None else mean_of_real(q, query_mask)
            direction = self.directions(k, mean_query)
            k = k.to(direction.dtype)
            if key_mask is not None and torch.is_grad_enabled():  # for the gradient of the direction: 0 · NaN is NaN
                k = k.masked_fill(~key_mask[:, None, :, None], 0.0)
            return masses_of((k @ direction[..., None])[..., 0], key_mask)

    def _native(self, q: Tensor, k: Tensor, key_mask: Tensor | None, query_mask: Tensor | None) -> Tensor:
        """The same in one pass over queries and keys."""
        assert self.direction is not None
        if self.query_weight is None:
            return cpu.key_masses(None, k, self.direction(k), None, None, key_mask)
        return cpu.key_masses(q, k, self.direction(k), self.query_weight(k), query_mask, key_mask)

    def directions(self, like: Tensor, mean_query: Tensor | None) -> Tensor:
        """What the keys of a head are multiplied by for their logits, `w + α q̄ / √D`: `(B or 1, H, D)`."""
        assert self.direction is not None
        direction = self.direction(like)[None]
        if self.query_weight is None:
            return direction
        assert mean_query is not None
        weight = self.query_weight(like)[:, None] * direction.shape[-1] ** -0.5
        return direction + weight * mean_query.to(direction.dtype)

    def extra_repr(self) -> str:
        return f"kind={self.kind!r}"


def masses_of(logits: Tensor, key_mask: Tensor | None) -> Tensor:
    """Masses `(B, H, M)` from their logits, sum 1 over real keys."""
    if key_mask is not None:
        # a large negative number, not -inf: a sample of padding alone must stay finite
        logits = logits.masked_fill(~key_mask[:, None, :], torch.finfo(logits.dtype).min)
    return logits.softmax(-1)


def mean_of_real(x: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over real tokens of `x (B, H, N, D)`, in at least fp32: `(B, H, D)`; 0 where there are none."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if mask is None:
        return x.mean(-2)
    real = mask[:, None, :, None]
    return x.masked_fill(~real, 0.0).sum(-2) / real.sum(-2).clamp_min(1)
