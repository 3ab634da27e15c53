"""Local mixing of the values by a depthwise convolution along the sequence or over the token grid."""

from __future__ import annotations

import math
from typing import Literal, get_args

from torch import Tensor, nn

ConvKind = Literal["1d", "2d"]
Sharing = Literal["none", "heads", "channels"]


class DepthwiseMixing(nn.Module):
    """A depthwise convolution of the values `(B, H, N, D)`, to be added to the output of the heads.

    Args:
        channels: number of filters: H·D, or D when heads share them, or H when the channels of a head do.
        sharing: "none" has one filter per channel of each head, "heads" the same D filters in every head,
            "channels" one filter per head (which makes the convolution a matrix over tokens).
    """

    def __init__(self, channels: int, kind: ConvKind, kernel_size: int = 3, *, sharing: Sharing = "none") -> None:
        super().__init__()
        if kind not in get_args(ConvKind):
            raise ValueError(f"local_conv must be None, '1d' or '2d', got {kind!r}.")
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd, so that the output keeps its length; got {kernel_size}.")
        if sharing not in get_args(Sharing):
            raise ValueError(f"sharing must be one of {', '.join(map(repr, get_args(Sharing)))}, got {sharing!r}.")
        self.kind = kind
        self.sharing = sharing
        conv = nn.Conv1d if kind == "1d" else nn.Conv2d
        self.conv: nn.Conv1d | nn.Conv2d = conv(
            channels, channels, kernel_size, padding=kernel_size // 2, groups=channels, bias=False
        )

    def forward(self, v: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        batch, heads, length, dim = v.shape
        by_head = v.permute(0, 3, 1, 2) if self.sharing == "channels" else v.transpose(2, 3)
        filters = {"none": heads * dim, "heads": dim, "channels": heads}[self.sharing]
        if filters != self.conv.in_channels:
            raise ValueError(
                f"local mixing was built with {self.conv.in_channels} filters, but values of shape {tuple(v.shape)} "
                f"need {filters} (sharing={self.sharing!r}): values must have the dimension of the heads."
            )
        channels_first = by_head.reshape(-1, filters, length).to(self.conv.weight.dtype)
        if self.kind == "2d":
            channels_first = channels_first.unflatten(2, square_grid(length, grid))
        mixed = self.conv(channels_first).to(v.dtype)
        if self.sharing == "channels":
            return mixed.reshape(batch, dim, heads, length).permute(0, 2, 3, 1)
        return mixed.reshape(batch, heads, dim, length).transpose(2, 3)


def square_grid(length: int, grid: tuple[int, int] | None) -> tuple[int, int]:
    """The given grid if it fits the number of tokens, or the square one."""
    if grid is None:
        side = math.isqrt(length)
        if side * side != length:
            raise ValueError(
                f"{length} tokens do not form a square: pass grid=(rows, columns), "
                "and prefix_tokens if the sequence starts with special tokens."
            )
        return side, side
    if grid[0] * grid[1] != length:
        raise ValueError(f"a grid of {grid[0]}×{grid[1]} has {grid[0] * grid[1]} tokens, but there are {length}.")
    return grid
