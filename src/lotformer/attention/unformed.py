"""Queries and keys that are never formed: what is linear in them is read off the input of their layer.

    q_i·z = x_i·(W_qᵀ z) + b_q·z

A mechanism that reads its queries and keys by a few products, as LOT does with its pivots, can have `W_qᵀ z` made once
for all tokens. For fewer products than channels that is cheaper than q and k, and they need not be kept for backward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


class Projections(NamedTuple):
    """How a layer would form the queries and keys of its heads: `x Wᵀ + b`.

    Attributes:
        weight: `(2, H, D, C)`, queries first. bias: `(2, H, D)`, or None.
    """

    weight: Tensor
    bias: Tensor | None

    @property
    def width(self) -> int:
        """C, the channels of a token."""
        return self.weight.shape[-1]

    def formed(self, side: int, x: Tensor) -> Tensor:
        """The queries (0) or the keys (1) of tokens `(…, C)`, as `(…, H, D)`."""
        weight, bias = self.weight[side], None if self.bias is None else self.bias[side]
        out = F.linear(x, weight.flatten(0, 1), None if bias is None else bias.flatten())
        return out.unflatten(-1, weight.shape[:2])

    def against(self, points: Tensor) -> tuple[Tensor, Tensor | None]:
        """Products of both sides with the points `(H, R, D)`, as a map of x: weight `(2, H, R, C)`, bias `(2, H, R)`."""
        return points @ self.weight, None if self.bias is None else (points @ self.bias[..., None])[..., 0]

    def as_keys_see(self, vectors: Tensor) -> Tensor:
        """`W_kᵀ u (B, H·V, C)` for vectors u `(B, H, V, D)`: its product with x is `u·k`, up to `u·b_k`."""
        batch, heads, count, dim = vectors.shape
        by_head = vectors.transpose(0, 1).reshape(heads, batch * count, dim) @ self.weight[1]
        return by_head.view(heads, batch, count, -1).transpose(0, 1).reshape(batch, heads * count, -1)


class Reads(NamedTuple):
    """What LOT reads of its queries and keys, as maps of the input of its layer.

    Attributes:
        scores, scores_bias: `scale · z·q` and then, unless keys are formed, `scale · z·k`: `(H·R or 2·H·R, C)`.
        masses: `w·k` of learned key masses that do not look at the queries, `(H, C)`; else None.
        projections: for what is read once a sample, or formed after all; None where nothing is.
    """

    scores: Tensor
    scores_bias: Tensor | None
    masses: Tensor | None
    projections: Projections | None
