"""Linear-angular attention (Castling-ViT): the linear terms of the angular kernel."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

from ..nn.depthwise import DepthwiseMixing
from ..nn.linear import linear_attention
from .base import Cost, Entry
from .clean import CleanAttention
from .inputs import Inputs


class AngularAttention(CleanAttention):
    """`x / |x| + conv(v)` with `x = v/2 + q̂ (k̂ᵀ v) / π`, q̂ and k̂ of unit length.

    These are the linear terms of `1 − angle(q, k)/π`; as published, the constant term is each token's own value
    and not the sum over tokens. The masked softmax branch, used by the publication in training only, is left out.

    Args:
        conv_kernel: length of the depthwise convolution along the sequence (one filter per head), or None.
    """

    def __init__(self, head_dim: int, num_heads: int, *, conv_kernel: int | None = 9) -> None:
        super().__init__(head_dim, num_heads)
        self.local = None if conv_kernel is None else DepthwiseMixing(num_heads, "1d", conv_kernel, sharing="channels")

    def why_equal_lengths(self) -> str | None:
        return "each token keeps half of its own value"

    def mix(self, inputs: Inputs) -> Tensor:
        q, k, v, key_mask, *_ = inputs
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        mixed = 0.5 * v + linear_attention(q, k, v, key_mask=key_mask, normalize=False) / math.pi
        out = F.normalize(mixed, dim=-1)
        return out if self.local is None else out + self.local(v)


def cost(n: int, d: int, *, conv_kernel: int | None = 9, **_: object) -> Cost:
    return Cost(flops=4.0 * n * d * d + 12.0 * n * d + 2.0 * n * d * (conv_kernel or 0), bytes=28.0 * n * d)


ENTRY = Entry(
    name="angular",
    build=AngularAttention,
    summary="Linear terms of the angular kernel, and a convolution.",
    citation="You et al. 2023, Castling-ViT: Compressing Self-Attention via Switching Towards Linear-Angular Attention",
    cost=cost,
    time="n",
    is_matrix=False,
    needs_equal_lengths=True,
)
