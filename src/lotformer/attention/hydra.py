"""Hydra attention: as many heads as channels, which makes attention a product of vectors."""

from __future__ import annotations

from torch import Tensor
from torch.linalg import vector_norm

from .base import Cost, Entry
from .clean import CleanAttention
from .inputs import Inputs


class Hydra(CleanAttention):
    """`q̂ ⊙ Σ_j k̂_j ⊙ v_j` with q̂, k̂ scaled to unit length over the channels of all heads.

    Each channel is a head of its own, so that the layer's heads only matter through that common length.
    """

    def mix(self, inputs: Inputs) -> Tensor:
        q, k, v, *_ = inputs
        if v.shape[-1] != self.head_dim:
            raise ValueError(
                f"Hydra multiplies keys and values: expected values of {self.head_dim}, got {v.shape[-1]}."
            )
        return q * _per_length(q) * (k * (v * _per_length(k))).sum(2, keepdim=True)


def _per_length(x: Tensor) -> Tensor:
    return vector_norm(x, dim=(1, 3), keepdim=True).clamp_min(1e-12).reciprocal()


def cost(n: int, d: int, **_: object) -> Cost:
    return Cost(flops=9.0 * n * d, bytes=16.0 * n * d)


ENTRY = Entry(
    name="hydra",
    build=Hydra,
    summary="One head per channel: products of vectors only.",
    citation="Bolya et al. 2022, Hydra Attention: Efficient Attention with Many Heads",
    cost=cost,
    time="n",
    is_matrix=False,
)
