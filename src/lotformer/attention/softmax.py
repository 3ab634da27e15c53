"""Softmax attention, by PyTorch's fused kernel."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .base import Attention, Cost, Entry
from .masking import zero_padding


class SoftmaxAttention(Attention):
    """`softmax(scale · q kᵀ) v` over the real keys; `scale` defaults to `D^-1/2`."""

    def __init__(self, head_dim: int, num_heads: int, *, scale: float | None = None, dropout: float = 0.0) -> None:
        super().__init__(head_dim, num_heads)
        self.scale = scale
        self.dropout = dropout

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        *,
        grid: tuple[int, int] | None = None,
    ) -> Tensor:
        q, k, v = zero_padding(q, query_mask), zero_padding(k, key_mask), zero_padding(v, key_mask)
        allowed = None if key_mask is None else key_mask[:, None, None, :]
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, dropout_p=dropout, scale=self.scale)
        if key_mask is not None:  # a sample without keys has nothing to mix: zeros, not NaN
            out = out.masked_fill(~key_mask.any(-1)[:, None, None, None], 0.0)
        return zero_padding(out, query_mask).to(q.dtype)  # autocast may have lowered it


def cost(n: int, d: int, **_: object) -> Cost:
    return Cost(flops=4.0 * n * n * d, bytes=16.0 * n * d)


ENTRY = Entry(
    name="softmax",
    build=SoftmaxAttention,
    summary="Softmax attention by PyTorch's fused kernel.",
    citation="Vaswani et al. 2017, Attention Is All You Need",
    cost=cost,
)
