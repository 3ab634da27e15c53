"""The attention slot of a vision model: any mechanism, with special tokens and a token grid."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .. import attention
from ..attention.base import Attention
from ..attention.inputs import Inputs
from ..attention.masking import zero_padding
from ..layers import AttentionLayer
from ..nn.grids import Grid, GridSource
from ..nn.prefix import PrefixRows

AUTHORS_CODE: Mapping[str, Any] = MappingProxyType(
    {"rank": 32, "eps": 1.0, "iters": 2, "pivot_init": "small", "kernel_size": 5, "conv_sharing": "heads"}
)
"""Options of LOT as in the authors' vision code: five half-steps, and a convolution of 5×5 that heads share.

The paper's text has five sweeps and a convolution of width 3, which are the defaults.
"""


class PrefixedAttention(Attention):
    """Special tokens read the whole sequence by softmax; `inner` mixes the tokens after them among themselves."""

    def __init__(self, inner: Attention, prefix_tokens: int) -> None:
        super().__init__(inner.head_dim, inner.num_heads)
        self.prefix_tokens = prefix_tokens
        self.prefix = PrefixRows()
        self.inner = inner

    def why_equal_lengths(self) -> str | None:
        return "its special tokens are queries and keys"

    def attend(self, inputs: Inputs) -> Tensor:
        q, k, v, key_mask, query_mask, _ = inputs
        special = self.prefix_tokens
        rows = self.prefix(zero_padding(q, query_mask)[:, :, :special], k, v, key_mask)
        rows = zero_padding(rows, None if query_mask is None else query_mask[:, :special])
        *patches, grid = inputs.after(special)
        return torch.cat([rows, self.inner(*patches, grid=grid)], 2)


class ImageAttention(AttentionLayer):
    """An attention layer of a vision model, whose first `prefix_tokens` tokens may read by softmax.

    That is an option of LOT's own; other mechanisms are put into a `PrefixedAttention`. In a model whose blocks hand on
    tokens alone, `grids` tells the grid.

    Args:
        num_tokens: of a mechanism that has positions for so many tokens; a function is asked when the layer is built.
    """

    grids: GridSource | None = None

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        mechanism: str,
        prefix_tokens: int = 0,
        num_tokens: Callable[[], int | Grid | None] | int | Grid | None = None,
        **words: Any,
    ) -> None:
        if mechanism == "lot" and "config" not in words:
            words["prefix_tokens"] = prefix_tokens
        if _has_positions(mechanism):
            words["num_tokens"] = num_tokens() if callable(num_tokens) else num_tokens
        super().__init__(dim, num_heads, mechanism, **words)
        if prefix_tokens and mechanism != "lot":
            self.mechanism = PrefixedAttention(self.mechanism, prefix_tokens)

    def _mix(self, x: Tensor, real: Tensor | None, grid: Grid | None) -> Tensor:
        if grid is None and self.grids is not None:
            grid = self.grids.of(x.shape[1])
        return super()._mix(x, real, grid)


def image_attention(
    mechanism: str,
    options: Mapping[str, Any] | None = None,
    *,
    special_tokens: int = 0,
    softmax_prefix: bool = True,
    grid: Callable[[], Grid | None] | Grid | None = None,
) -> type[ImageAttention]:
    """The signature of timm's `attn_layer`.

    LOT gets the paper's best setting: 32 pivots; where special tokens read by softmax, with polarised scores; and a
    2-D convolution of the patches, unless special tokens are among what is coupled. Softmax attention needs no prefix:
    its special tokens read by softmax already. FLatten and PolaFormer get their positions of the keys. `config=` in the
    options is LOT's whole configuration, its prefix included: `LOTConfig(prefix=Prefix(1))` for a model with [CLS].

    Args:
        grid: the `(rows, columns)` of the patches, or a function that is asked when a layer is built.
    """
    prefix_tokens = special_tokens if softmax_prefix and mechanism != "softmax" else 0
    chosen: dict[str, Any] = {}
    if mechanism == "lot" and "config" not in (options or {}):
        chosen["rank"] = 32
        chosen["polarize_prefix"] = prefix_tokens > 0
        chosen["local_conv"] = "2d" if prefix_tokens == special_tokens else None
    elif grid is not None and _has_positions(mechanism):
        chosen["num_tokens"] = grid if prefix_tokens == special_tokens else _counted(grid, special_tokens)
    chosen.update(options or {})
    return ImageAttention.with_options(mechanism=mechanism, prefix_tokens=prefix_tokens, **chosen)


def _has_positions(mechanism: str) -> bool:
    return "num_tokens" in inspect.signature(attention.entry(mechanism).build).parameters


def _counted(grid: Callable[[], Grid | None] | Grid, special_tokens: int) -> Callable[[], int | None]:
    """The number of tokens where special ones stand before the grid."""

    def count() -> int | None:
        found = grid() if callable(grid) else grid
        return None if found is None else special_tokens + math.prod(found)

    return count
