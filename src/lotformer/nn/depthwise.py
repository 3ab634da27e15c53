"""Local mixing of the values by a depthwise convolution along the sequence or over the token grid."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from .checks import require_count

ConvKind = Literal["1d", "2d"]
Sharing = Literal["none", "heads", "channels"]


class DepthwiseMixing(nn.Module):
    """A depthwise convolution of the values `(B, H, N, D)`, to be added to the output of the heads.

    Args:
        channels: number of filters: H·D, or D when heads share them, or H when the channels of a head do.
        sharing: "none" has one filter per channel of each head, "heads" the same D filters in every head,
            "channels" one filter per head along the sequence, which makes the convolution a matrix over tokens.
    """

    def __init__(self, channels: int, kind: ConvKind, kernel_size: int = 3, *, sharing: Sharing = "none") -> None:
        super().__init__()
        if kind not in get_args(ConvKind):
            raise ValueError(f"local_conv must be None, '1d' or '2d', got {kind!r}.")
        require_count("kernel_size", kernel_size)
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd, so that the output keeps its length; got {kernel_size}.")
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
        batch, heads, length, dim = v.shape
        filters = {"none": heads * dim, "heads": dim, "channels": heads}[self.sharing]
        if filters != self.conv.in_channels:
            raise ValueError(
                f"local mixing was built with {self.conv.in_channels} filters, but values of shape {tuple(v.shape)} "
                f"need {filters} (sharing={self.sharing!r}): values must have the dimension of the heads."
            )
        weight = self.conv.weight
        if self.sharing == "channels":  # heads are the channels already and head channels a second axis: no transpose
            pad = weight.shape[2] // 2
            return F.conv2d(v.to(weight.dtype), weight[..., None], padding=(pad, 0), groups=heads).to(v.dtype)
        # -1 for the images would make the exporter guess at divisibility by the length
        images = batch * heads * dim // filters
        channels_first = v.transpose(2, 3).reshape(images, filters, length).to(weight.dtype)
        if self.kind == "2d":
            channels_first = channels_first.unflatten(2, square_grid(length, grid))
        return self.conv(channels_first).to(v.dtype).reshape(batch, heads, dim, length).transpose(2, 3)


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
        raise ValueError(
            f"a grid of {grid[0]}×{grid[1]} has {grid[0] * grid[1]} tokens, but there are {length}: "
            "special tokens at the start are named by prefix_tokens."
        )
    return grid
