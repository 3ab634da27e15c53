"""Enhanced linear attention (EfficientViT): a ReLU kernel with a depthwise convolution for what is near."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..nn.depthwise import DepthwiseMixing
from ..nn.linear import linear_attention
from .base import Cost, Entry
from .clean import CleanAttention
from .inputs import Inputs


class EnhancedAttention(CleanAttention):
    """`relu(q) (relu(k)ᵀ v) / (relu(q) · Σ relu(k) + 1e-15) + conv(v)`.

    The form compared under the name "enhanced linear attention": the ReLU kernel and local information from a
    depthwise 2-D convolution. The publication places its convolution inside the feed-forward block; here, where a
    mechanism owns no feed-forward, it mixes the values. The multi-scale branch of its later version is left out.

    Args:
        local_conv: add the convolution, one filter per channel. kernel_size: its side.
    """

    def __init__(self, head_dim: int, num_heads: int, *, local_conv: bool = True, kernel_size: int = 3) -> None:
        super().__init__(head_dim, num_heads)
        self.local = DepthwiseMixing(num_heads * head_dim, "2d", kernel_size) if local_conv else None

    @property
    def is_matrix(self) -> bool:
        return self.local is None

    def why_equal_lengths(self) -> str | None:
        return None if self.local is None else "its convolution of the values; local_conv=False removes it"

    def mix(self, inputs: Inputs) -> Tensor:
        q, k, v, key_mask, _, grid = inputs
        out = linear_attention(F.relu(q), F.relu(k), v, key_mask=key_mask, eps=1e-15)
        return out if self.local is None else out + self.local(v, grid)


def cost(n: int, d: int, *, local_conv: bool = True, kernel_size: int = 3, **_: object) -> Cost:
    convolution = 2.0 * n * d * kernel_size**2 if local_conv else 0.0
    return Cost(flops=4.0 * n * d * d + 4.0 * n * d + convolution, bytes=28.0 * n * d)


ENTRY = Entry(
    name="enhanced",
    build=EnhancedAttention,
    summary="ReLU kernel and a 2-D convolution.",
    citation="Cai et al. 2022, EfficientViT: Enhanced Linear Attention for High-Resolution Low-Computation Visual "
    "Recognition",
    cost=cost,
    time="n",
    is_matrix=False,
    needs_equal_lengths=True,
    needs_grid=True,
)
