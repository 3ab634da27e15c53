"""Hedgehog: learned exponential features that imitate softmax attention."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from ..nn.feature_maps import HeadwiseLinear, exponential_features
from ..nn.linear import linear_attention
from .base import Cost, Entry
from .clean import CleanAttention
from .inputs import Inputs

Activation = Literal["exp", "softmax"]


class Hedgehog(CleanAttention):
    """Kernel attention with `φ(x) = [exp(W x + b), exp(−W x − b)]`, one map per head, for queries and for keys.

    Args:
        activation: "exp" as in the paper, computed without overflow; "softmax" normalises each half over its
            features, the bounded form of released code.
        tied: use one map for queries and keys. bias: learn b. Maps start as the identity.
    """

    def __init__(
        self, head_dim: int, num_heads: int, *, activation: Activation = "exp", tied: bool = False, bias: bool = True
    ) -> None:
        super().__init__(head_dim, num_heads)
        if activation not in get_args(Activation):
            raise ValueError(f"activation must be 'exp' or 'softmax', got {activation!r}.")
        self.activation = activation
        self.query_map = HeadwiseLinear(num_heads, head_dim, head_dim, bias=bias, init="identity")
        self.key_map = None if tied else HeadwiseLinear(num_heads, head_dim, head_dim, bias=bias, init="identity")

    def mix(self, inputs: Inputs) -> Tensor:
        q, k, v, key_mask, *_ = inputs
        phi_q, phi_k = self.features(q, k, key_mask)
        return linear_attention(phi_q, phi_k, v, key_mask=key_mask)

    def features(self, q: Tensor, k: Tensor, key_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Features `(B, H, N, 2 D)` and `(B, H, M, 2 D)`; the matrix is their product with rows normalised."""
        key_map = self.query_map if self.key_map is None else self.key_map
        q, k = self.query_map(q), key_map(k)
        if self.activation == "softmax":
            phi_q, phi_k = (torch.cat([x.softmax(-1), (-x).softmax(-1)], -1) for x in (q, k))
            return phi_q, phi_k
        return exponential_features(torch.cat([q, -q], -1), torch.cat([k, -k], -1), key_mask)


def cost(n: int, d: int, **_: object) -> Cost:
    """Two d×d maps and the contraction of 2 d features."""
    return Cost(flops=12.0 * n * d * d + 8.0 * n * d, bytes=32.0 * n * d)


ENTRY = Entry(
    name="hedgehog",
    build=Hedgehog,
    summary="Learned exponential features that imitate softmax.",
    citation="Zhang et al. 2024, The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax Mimicry",
    cost=cost,
    time="n",
)
