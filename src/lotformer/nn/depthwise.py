"""Local mixing of the values by a depthwise convolution along the sequence or over the token grid."""

from __future__ import annotations

import math
from typing import Literal, get_args

from torch import Tensor, nn

ConvKind = Literal["1d", "2d"]


class DepthwiseMixing(nn.Module):
    """A depthwise convolution of the values `(B, H, N, D)`, to be added to the output of the heads."""

    def __init__(self, channels: int, kind: ConvKind, kernel_size: int = 3) -> None:
        super().__init__()
        if kind not in get_args(ConvKind):
            raise ValueError(f"local_conv must be None, '1d' or '2d', got {kind!r}.")
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd, so that the output keeps its length; got {kernel_size}.")
        self.kind = kind
        conv = nn.Conv1d if kind == "1d" else nn.Conv2d
        self.conv: nn.Module = conv(
            channels, channels, kernel_size, padding=kernel_size // 2, groups=channels, bias=False
        )

    def forward(self, v: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        batch, heads, length, dim = v.shape
        channels_first = v.transpose(2, 3).reshape(batch, heads * dim, length)
        if self.kind == "2d":
            channels_first = channels_first.unflatten(2, square_grid(length, grid))
        mixed = self.conv(channels_first)
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
