"""The Linear Transformer: attention with the kernel of `elu + 1`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..nn.linear import linear_attention
from .base import Cost, Entry
from .clean import CleanAttention
from .inputs import Inputs


class LinearTransformer(CleanAttention):
    """`φ(q) (φ(k)ᵀ v) / (φ(q) · Σ φ(k) + eps)` with `φ = elu + 1`."""

    def __init__(self, head_dim: int, num_heads: int, *, eps: float = 1e-6) -> None:
        super().__init__(head_dim, num_heads)
        self.eps = eps

    def mix(self, inputs: Inputs) -> Tensor:
        q, k, v, key_mask, *_ = inputs
        return linear_attention(F.elu(q) + 1, F.elu(k) + 1, v, key_mask=key_mask, eps=self.eps)


def cost(n: int, d: int, **_: object) -> Cost:
    return Cost(flops=4.0 * n * d * d + 6.0 * n * d, bytes=24.0 * n * d)


ENTRY = Entry(
    name="linear-transformer",
    build=LinearTransformer,
    summary="Kernel attention with the feature map elu + 1.",
    citation="Katharopoulos et al. 2020, Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention",
    cost=cost,
    time="n",
)
