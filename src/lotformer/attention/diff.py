"""Differential attention: the difference of two softmax attentions cancels what they have in common."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..nn.checks import require_count
from ..nn.softmax import fused_softmax
from .base import Attention, Cost, Entry
from .inputs import Inputs


class DifferentialAttention(Attention):
    """`(softmax(q₁ k₁ᵀ s) - λ softmax(q₂ k₂ᵀ s)) v`, then RMSNorm per head, times `1 - λ₀`.

    q₁, q₂ and k₁, k₂ are the halves of a head, `s = (D/2)^-1/2`, so that D must be even. That is the publication's
    layout of H pairs of half-wide heads with values of full width, and it keeps `(B, H, N, D)` in and out.

        λ = exp(λq₁·λk₁) - exp(λq₂·λk₂) + λ₀,     λ₀ = 0.8 - 0.6 exp(-0.3 layer)

    Args:
        layer: index of the layer from 0, which sets λ₀. norm: apply the RMSNorm and its factor (without them the
            mechanism is a matrix).
    """

    def __init__(self, head_dim: int, num_heads: int, *, layer: int = 0, norm: bool = True) -> None:
        super().__init__(head_dim, num_heads)
        if head_dim % 2:
            raise ValueError(f"diff splits a head in two halves: expected an even head_dim, got {head_dim}.")
        require_count("layer", layer, least=0)
        self.start = 0.8 - 0.6 * math.exp(-0.3 * layer)
        self.query_lambda = nn.Parameter(0.1 * torch.randn(2, head_dim // 2))
        self.key_lambda = nn.Parameter(0.1 * torch.randn(2, head_dim // 2))
        self.norm = nn.Parameter(torch.ones(head_dim)) if norm else None

    def balance(self) -> Tensor:
        """λ, the weight of the second attention."""
        first, second = (self.query_lambda * self.key_lambda).sum(-1).exp()
        return first - second + self.start

    def attend(self, inputs: Inputs) -> Tensor:
        q, k, v, *_ = inputs.cleaned()
        if self.norm is not None and v.shape[-1] != self.head_dim:
            raise ValueError(f"diff normalises values of width head_dim={self.head_dim}, got {v.shape[-1]}.")
        # both halves in one call: the second half of the heads is the second attention
        halves_q, halves_k = (torch.cat(x.chunk(2, -1), 1) for x in (q, k))
        both = fused_softmax(halves_q, halves_k, v.repeat(1, 2, 1, 1), inputs.allowed)
        first, second = both.to(torch.promote_types(q.dtype, torch.float32)).chunk(2, 1)
        out = first - self.balance() * second
        if self.norm is not None:
            out = F.rms_norm(out, (self.head_dim,), self.norm.to(out.dtype), eps=1e-5) * (1 - self.start)
        return inputs.finished(out)


def cost(n: int, d: int, **_: object) -> Cost:
    """Two attentions of half the score width and full value width."""
    return Cost(flops=2.0 * (n * n * d + 2.0 * n * n * d), bytes=24.0 * n * d)


ENTRY = Entry(
    name="diff",
    build=DifferentialAttention,
    summary="The difference of two softmax attentions, normalised per head.",
    citation="Ye et al. 2025, Differential Transformer",
    cost=cost,
    is_matrix=False,
)
