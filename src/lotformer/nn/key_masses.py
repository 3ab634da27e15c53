"""Masses of the keys as a function of the input: what a converted checkpoint needs for its attention sinks."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

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
        with torch.autocast(k.device.type, enabled=False):
            direction = self.direction(k)[None]
            k = k.to(direction.dtype)
            if self.query_weight is not None:
                mean_query = _mean_of_real(q.to(k.dtype), query_mask)
                direction = direction + self.query_weight(k)[:, None] * k.shape[-1] ** -0.5 * mean_query
            if key_mask is not None:
                k = k.masked_fill(~key_mask[:, None, :, None], 0.0)
            logits = (k @ direction[..., None])[..., 0]
            if key_mask is not None:
                # a large negative number, not -inf: a sample of padding alone must stay finite
                logits = logits.masked_fill(~key_mask[:, None, :], torch.finfo(logits.dtype).min)
            return logits.softmax(-1)

    def extra_repr(self) -> str:
        return f"kind={self.kind!r}"


def _mean_of_real(q: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return q.mean(-2)
    real = mask[:, None, :, None]
    return q.masked_fill(~real, 0.0).sum(-2) / real.sum(-2).clamp_min(1)
