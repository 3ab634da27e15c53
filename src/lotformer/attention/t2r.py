"""T2R: kernel attention with a learned ReLU feature map, for conversion by fine-tuning."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..nn.checks import require_count, require_moderate
from ..nn.feature_maps import HeadwiseLinear
from ..nn.linear import linear_attention
from .base import Cost, Entry
from .clean import CleanAttention
from .inputs import Inputs


class T2R(CleanAttention):
    """Kernel attention `φ(scale · q) φ(k)ᵀ`, normalised, with `φ(x) = relu(W x + b)`, one map per head.

    Args:
        features: size of φ, D by default. tied: use one map for queries and keys, as published.
        scale: of the queries before the map, `D^-1/2` by default, as in the authors' code.
        floor: the normaliser is at least this; the authors' code, which runs in fp16, has 1e-2.
    """

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        *,
        features: int | None = None,
        tied: bool = True,
        scale: float | None = None,
        floor: float = 1e-6,
    ) -> None:
        super().__init__(head_dim, num_heads)
        features = head_dim if features is None else features
        require_count("features", features)
        require_moderate("floor", floor, least=1e-20)
        if scale is not None:
            require_moderate("scale", scale, signed=True)
        self.scale = head_dim**-0.5 if scale is None else scale
        self.floor = floor
        self.query_map = HeadwiseLinear(num_heads, head_dim, features)
        self.key_map = None if tied else HeadwiseLinear(num_heads, head_dim, features)

    def mix(self, inputs: Inputs) -> Tensor:
        q, k, v, key_mask, *_ = inputs
        key_map = self.query_map if self.key_map is None else self.key_map
        phi_q, phi_k = F.relu(self.query_map(self.scale * q)), F.relu(key_map(k))
        return linear_attention(phi_q, phi_k, v, key_mask=key_mask, floor=self.floor)


def cost(n: int, d: int, *, features: int | None = None, **_: object) -> Cost:
    """Two maps and the contraction."""
    m = d if features is None else features
    return Cost(flops=8.0 * n * d * m + 4.0 * n * m, bytes=16.0 * n * d + 8.0 * n * m)


ENTRY = Entry(
    name="t2r",
    build=T2R,
    summary="Learned ReLU features.",
    citation="Kasai et al. 2021, Finetuning Pretrained Transformers into RNNs",
    cost=cost,
    time="n",
)
