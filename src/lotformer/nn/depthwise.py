"""Local mixing of the values by a depthwise convolution along the sequence or over the token grid."""

from __future__ import annotations

import math
import operator
from typing import Any, Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from .checks import require_count
from .watched import is_watched

ConvKind = Literal["1d", "2d"]
ConvSharing = Literal["none", "heads"]
"""The sharing of filters that leaves a convolution fit for what has a prefix."""
Sharing = Literal["none", "heads", "channels"]


def require_convolution(kind: Any, size: Any) -> None:
    """Refuse a convolution that cannot be built."""
    if kind not in get_args(ConvKind):
        raise ValueError(f"local_conv must be None, '1d' or '2d', got {kind!r}.")
    require_count("kernel_size", size)
    if size % 2 == 0:
        raise ValueError(f"kernel_size must be odd, so that the output keeps its length; got {size}.")


class DepthwiseMixing(nn.Module):
    """A depthwise convolution of the values `(B, H, N, D)`, to be added to the output of the heads.

    Args:
        channels: number of filters: H·D, or D when heads share them, or H when the channels of a head do.
        sharing: "none" has one filter per channel of each head, "heads" the same D filters in every head,
            "channels" one filter per head along the sequence, which makes the convolution a matrix over tokens.
    """

    def __init__(self, channels: int, kind: ConvKind, kernel_size: int = 3, *, sharing: Sharing = "none") -> None:
        super().__init__()
        require_convolution(kind, kernel_size)
        if sharing not in get_args(Sharing):
            raise ValueError(f"sharing must be one of {', '.join(map(repr, get_args(Sharing)))}, got {sharing!r}.")
        if sharing == "channels" and kind == "2d":
            raise ValueError("filters shared by the channels of a head run along the sequence: use kind='1d'.")
        self.kind = kind
        self.sharing = sharing
        conv = nn.Conv1d if kind == "1d" else nn.Conv2d
        self.conv: nn.Conv1d | nn.Conv2d = conv(
            channels, channels, kernel_size, padding=kernel_size // 2, groups=channels, bias=False
        )

    def forward(self, v: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        self._require_filters(v)
        if self.sharing == "channels":  # heads are the channels already and head channels a second axis: no transpose
            weight = self.conv.weight
            pad = weight.shape[2] // 2
            return F.conv2d(v.to(weight.dtype), weight[..., None], padding=(pad, 0), groups=v.shape[1]).to(v.dtype)
        grid = self._grid(v.shape[2], grid)
        return ops.join(None, None, v, self.conv.weight, None, None, grid, self._as_module())

    def joined(
        self,
        rows: Tensor | None,
        out: Tensor,
        v: Tensor,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        grid: tuple[int, int] | None = None,
        *,
        backend: str | None = None,
    ) -> Tensor:
        """`out (B, H, N, D)` with the convolution of its values added, behind the rows `(B, H, P, D)` of a prefix.

        The values and masks are those of all `P + N` tokens; padded values may hold anything, and padding receives
        nothing.
        """
        self._require_filters(v)
        if self.sharing == "channels":
            raise ValueError("filters shared by the channels of a head mix values alone: rows are not joined to them.")
        grid = self._grid(out.shape[2], grid) if out.shape[2] else (0, 0)
        convolution = self._as_module()
        return ops.join(out, rows, v, self.conv.weight, query_mask, key_mask, grid, convolution, backend=backend)

    def _as_module(self) -> nn.Module | None:
        """The convolution where it has to be called: somebody looks at it, or has put something else in its place."""
        plain = type(self.conv) in (nn.Conv1d, nn.Conv2d) and not is_watched(self.conv)
        return None if plain else self.conv

    def _grid(self, length: int, grid: tuple[int, int] | None) -> tuple[int, int]:
        return square_grid(length, grid) if self.kind == "2d" else (1, length)

    def _require_filters(self, v: Tensor) -> None:
        _, heads, _, dim = v.shape
        filters = {"none": heads * dim, "heads": dim, "channels": heads}[self.sharing]
        if filters != self.conv.in_channels:
            raise ValueError(
                f"local mixing was built with {self.conv.in_channels} filters, but values of shape {tuple(v.shape)} "
                f"need {filters} (sharing={self.sharing!r}): values must have the dimension of the heads."
            )


def square_grid(length: int, grid: tuple[int, int] | None) -> tuple[int, int]:
    """The given grid if it fits the number of tokens, or the square one."""
    if grid is None:
        side = math.isqrt(operator.index(length))  # a traced length has to be a number here
        if side * side != length:
            raise ValueError(
                f"{length} tokens do not form a square: pass grid=(rows, columns), "
                "and prefix_tokens if the sequence starts with special tokens."
            )
        return side, side
    if grid[0] * grid[1] != length:
        raise ValueError(
            f"a grid of {grid[0]}×{grid[1]} has {grid[0] * grid[1]} tokens, but there are {length}: "
            "special tokens at the start are named by prefix_tokens."
        )
    return grid
