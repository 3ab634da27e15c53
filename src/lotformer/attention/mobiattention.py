"""MobileAttention: linear attention in which heads compete for what a token gives and takes."""

from __future__ import annotations

import torch
from torch import Tensor

from ..nn.checks import require_moderate
from ..nn.linear import linear_attention
from .base import Cost, Entry
from .clean import CleanAttention
from .inputs import Inputs
from .masking import count_real


class MobiAttention(CleanAttention):
    """Flow attention whose conserved flows are sums over heads, token by token.

    q, k through sigmoid;   I = 1 / Σ_d q Σ_h k,   O = 1 / Σ_d k Σ_h q          (eps added to each factor)
    sink = Σ_d q Σ_h (k O),   source = clip(Σ_d k Σ_h (q I), −1, 1)
    out = sigmoid(sink) · (q I) (kᵀ (v · N softmax_tokens(source)))
    """

    def __init__(self, head_dim: int, num_heads: int, *, eps: float = 1e-6) -> None:
        super().__init__(head_dim, num_heads)
        require_moderate("eps", eps, least=0)
        self.eps = eps

    def why_equal_lengths(self) -> str | None:
        return "the flows of a token compare its query with its key"

    def mix(self, inputs: Inputs) -> Tensor:
        q, k, v, key_mask, *_ = inputs
        q, k = q.sigmoid(), k.sigmoid()
        incoming = q / self._flow(q, k)
        outgoing = k / self._flow(k, q)
        sink = self._flow(q, outgoing)
        source = self._flow(k, incoming).clamp(-1.0, 1.0)
        if key_mask is not None:
            source = source.masked_fill(~key_mask[:, None, :, None], torch.finfo(source.dtype).min)
        competition = source.softmax(2) * count_real(k, key_mask)
        mixed = linear_attention(incoming, k, v * competition, key_mask=key_mask, normalize=False)
        return sink.sigmoid() * mixed

    def _flow(self, x: Tensor, y: Tensor) -> Tensor:
        """`Σ_d x Σ_h y` for every head and token, `(B, H, N, 1)`."""
        return ((x + self.eps) * (y.sum(1, keepdim=True) + self.eps)).sum(-1, keepdim=True)


def cost(n: int, d: int, **_: object) -> Cost:
    return Cost(flops=4.0 * n * d * d + 30.0 * n * d, bytes=28.0 * n * d)


ENTRY = Entry(
    name="mobiattention",
    build=MobiAttention,
    summary="Flow attention with competition between heads.",
    citation="Yao et al. 2024, Mobile Attention: Mobile-Friendly Linear-Attention for Vision Transformers",
    cost=cost,
    time="n",
    needs_equal_lengths=True,
)
