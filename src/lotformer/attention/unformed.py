"""Queries and keys that are never formed: what is linear in them is read off the input of their layer.

    q_i·z = x_i·(W_qᵀ z) + b_q·z

A mechanism that reads its queries and keys by a few products, as LOT does with its pivots, can have `W_qᵀ z` made once
for all tokens. For fewer products than channels that is cheaper than q and k, and they need not be kept for backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear(NamedTuple):
    """A linear map of tokens: weight `(rows, C)`, and bias `(rows,)` or None."""

    weight: Tensor
    bias: Tensor | None


def at_once(x: Tensor, maps: Sequence[Linear]) -> Sequence[Tensor]:
    """The tokens `x (B, N, C)` under every map.

    By one product, whose results are views of one tensor: x is read once, and its gradient is not a sum of several.
    Few tokens are not worth putting the weights together.
    """
    rows = [len(weight) for weight, _ in maps]
    if len(maps) == 1 or (not torch.compiler.is_compiling() and x.shape[0] * x.shape[1] < sum(rows)):
        return [F.linear(x, weight, bias) for weight, bias in maps]
    bias = None
    if any(bias is not None for _, bias in maps):
        bias = torch.cat([weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in maps])
    return F.linear(x, torch.cat([weight for weight, _ in maps]), bias).split(rows, -1)


def products_by_head(tokens: Tensor, points: Tensor) -> Tensor:
    """`(B, H, N, R)`: tokens `(B, H, N, D)` with the points `(H, R, D)` of their head.

    Heads come first in memory: a product for every head reads tokens that lie side by side as they are.
    """
    batch, _, length, _ = tokens.shape
    return (tokens.transpose(0, 1).flatten(1, 2) @ points.mT).unflatten(1, (batch, length)).transpose(0, 1)


class Side(NamedTuple):
    """A layer's projection to the queries, or keys, of its heads: weight `(H, D, C)`, bias `(H, D)` or None."""

    weight: Tensor
    bias: Tensor | None

    @property
    def map(self) -> Linear:
        """From tokens `(…, C)` to `(…, H·D)`."""
        return Linear(self.weight.flatten(0, 1), None if self.bias is None else self.bias.flatten())

    def formed(self, x: Tensor) -> Tensor:
        """The queries or keys of tokens `(…, C)`, as `(…, H, D)`."""
        return F.linear(x, *self.map).unflatten(-1, self.weight.shape[:2])

    def against(self, points: Tensor) -> Linear:
        """Products with the points `(H, R, D)`, as a map to `(…, H·R)`."""
        bias = None if self.bias is None else (points @ self.bias[..., None]).flatten()
        return Linear((points @ self.weight).flatten(0, 1), bias)

    def seen_by(self, vectors: Tensor) -> Tensor:
        """`Wᵀ u (B, H·V, C)` for vectors u `(B, H, V, D)`: its product with x is `u·k`, up to `u·b`."""
        batch, heads, count, dim = vectors.shape
        by_head = vectors.transpose(0, 1).reshape(heads, batch * count, dim) @ self.weight
        return by_head.view(heads, batch, count, -1).transpose(0, 1).reshape(batch, heads * count, -1)


class Projections(NamedTuple):
    """The projections of a layer to the queries and keys of its heads: `x Wᵀ + b`.

    Attributes:
        weight: `(2, H, D, C)`, queries first. bias: `(2, H, D)`, or None.
    """

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(
        cls, weight: Tensor, bias: Tensor | None, num_heads: int, head_dim: int, query_factor: float = 1.0
    ) -> Projections:
        """From the weight `(2·H·D or more, C)` of a linear map to queries, keys and perhaps more, and its bias."""
        rows, shape = 2 * num_heads * head_dim, (2, num_heads, head_dim)
        if len(weight) > rows:
            weight, bias = weight[:rows], None if bias is None else bias[:rows]
        weight, bias = weight.view(*shape, -1), None if bias is None else bias.view(shape)
        if query_factor != 1.0:
            weight = torch.stack([query_factor * weight[0], weight[1]])
            bias = None if bias is None else torch.stack([query_factor * bias[0], bias[1]])
        return cls(weight, bias)

    def sides(self) -> tuple[Side, Side]:
        """Queries and keys. Taken apart once: each part on its own would have a gradient as large as the whole."""
        weights, biases = self.weight.unbind(0), (None, None) if self.bias is None else self.bias.unbind(0)
        return Side(weights[0], biases[0]), Side(weights[1], biases[1])


def why_too_coarse(dtype: torch.dtype) -> str | None:
    """The reason to form queries and keys for tokens or weights of this precision, or None."""
    if dtype in (torch.float32, torch.float64):
        return None
    # the rounding of a token averages out over its channels, that of a score stays
    return f"its weights are {dtype}, and scores rounded to that would be too coarse: use .float()"


class Reads(NamedTuple):
    """The maps from the input of a layer to all that LOT reads of its queries and keys.

    Attributes:
        scores: `scale · z·q` and then, unless keys are formed, `scale · z·k`: maps to `H·R` a side, one or more.
        masses: `w·k` of learned key masses that do not look at the queries, `(H, C)`; else None.
        queries, keys: for what is read once a sample, or formed after all; None where nothing is.
        forms_keys: whether all keys are.
    """

    scores: tuple[Linear, ...]
    masses: Tensor | None
    queries: Side | None
    keys: Side | None
    forms_keys: bool
