"""Efficient attention: two softmaxes, one over features and one over tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ..nn.linear import linear_attention
from .base import Cost, Entry
from .clean import CleanAttention
from .inputs import Inputs


class EfficientAttention(CleanAttention):
    """`softmax_features(q) (softmax_tokens(k)ᵀ v)`: rows of the matrix sum to 1 with no further normaliser."""

    def mix(self, inputs: Inputs) -> Tensor:
        q, k, v, key_mask, *_ = inputs
        if key_mask is not None:
            k = k.masked_fill(~key_mask[:, None, :, None], torch.finfo(k.dtype).min)
        return linear_attention(q.softmax(-1), k.softmax(-2), v, key_mask=key_mask, normalize=False)


def cost(n: int, d: int, **_: object) -> Cost:
    return Cost(flops=4.0 * n * d * d + 10.0 * n * d, bytes=24.0 * n * d)


ENTRY = Entry(
    name="efficient",
    build=EfficientAttention,
    summary="Softmax over features of queries and over tokens of keys.",
    citation="Shen et al. 2021, Efficient Attention: Attention with Linear Complexities",
    cost=cost,
    time="n",
)
