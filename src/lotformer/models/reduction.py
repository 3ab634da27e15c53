"""PVT's own attention: softmax over keys and values of a map that a strided convolution has shrunk."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..layers import AttentionLayer
from ..nn.checks import require_count
from ..nn.depthwise import square_grid
from ..nn.grids import Grid


class ReducedAttention(AttentionLayer):
    """Softmax attention of `N` tokens to `N / ratio²` keys: patches of `ratio × ratio` tokens, normalised.

    Its projections are those of the other layers, so that weights without reduction load; rows and columns of the map
    beyond a multiple of the ratio are not read.

    Args:
        ratio: side of the patches. Others as in `AttentionLayer`.
    """

    def __init__(self, dim: int, num_heads: int = 8, *, ratio: int, **words: Any) -> None:
        super().__init__(dim, num_heads, "softmax", **words)
        require_count("ratio", ratio)
        factory: dict[str, Any] = {"device": words.get("device"), "dtype": words.get("dtype")}
        self.ratio = ratio
        self.sr = nn.Conv2d(dim, dim, ratio, stride=ratio, **factory)
        self.sr_norm = (words.get("norm_layer") or nn.LayerNorm)(dim, **factory)

    def _mix(self, x: Tensor, real: Tensor | None, grid: Grid | None) -> Tensor:
        if real is not None:
            raise ValueError("padding would be mixed into the keys: attention with spatial reduction takes no mask.")
        rows, columns = square_grid(x.shape[1], grid)
        if min(rows, columns) < self.ratio:
            raise ValueError(
                f"a map of {rows}×{columns} tokens is smaller than the reduction ratio {self.ratio}: use larger "
                "images, or smaller `sr_ratios`."
            )
        dim = x.shape[2]
        weights = self.qkv.weight.split([dim, 2 * dim])
        biases = (None, None) if self.qkv.bias is None else self.qkv.bias.split([dim, 2 * dim])
        reduced = self.sr(x.mT.unflatten(2, (rows, columns))).flatten(2).mT
        q = F.linear(x, weights[0], biases[0])
        kv = F.linear(self.sr_norm(reduced), weights[1], biases[1])
        q = q.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        k, v = kv.unflatten(-1, (2, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.mechanism(self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype), v)
