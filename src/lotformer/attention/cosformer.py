"""cosFormer: ReLU kernel attention that weighs tokens by the cosine of their distance."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..nn.checks import require_moderate
from ..nn.linear import linear_attention
from .base import Cost, Entry
from .clean import CleanAttention
from .inputs import Inputs
from .masking import count_real, rank_among_real


class CosFormer(CleanAttention):
    """Weights `relu(q_i)·relu(k_j) cos(π/2 · (i − j) / L)`, normalised by their sum plus `eps`.

    i and j count real tokens, and L is the larger of the two real lengths: all cosines are positive. The cosine of
    a difference splits into features `[x sin, x cos]`, which keeps it linear.
    """

    def __init__(self, head_dim: int, num_heads: int, *, eps: float = 1e-6) -> None:
        super().__init__(head_dim, num_heads)
        require_moderate("eps", eps, least=0)
        self.eps = eps

    def mix(self, inputs: Inputs) -> Tensor:
        q, k, v, key_mask, query_mask, *_ = inputs
        length = torch.maximum(count_real(q, query_mask), count_real(k, key_mask))
        phi_q = _rotate(F.relu(q), query_mask, length)
        phi_k = _rotate(F.relu(k), key_mask, length)
        return linear_attention(phi_q, phi_k, v, key_mask=key_mask, eps=self.eps)


def _rotate(x: Tensor, mask: Tensor | None, length: Tensor) -> Tensor:
    angle = (0.5 * math.pi / length) * (rank_among_real(x, mask) + 1)[:, None, :, None].to(x.dtype)
    return torch.cat([x * angle.sin(), x * angle.cos()], -1)


def cost(n: int, d: int, **_: object) -> Cost:
    return Cost(flops=8.0 * n * d * d + 8.0 * n * d, bytes=32.0 * n * d)


ENTRY = Entry(
    name="cosformer",
    build=CosFormer,
    summary="ReLU kernel with a cosine weight of the distance.",
    citation="Qin et al. 2022, cosFormer: Rethinking Softmax in Attention",
    cost=cost,
    time="n",
)
