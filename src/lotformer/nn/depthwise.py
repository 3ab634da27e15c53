"""Local mixing of the values by a depthwise convolution along the sequence or over the token grid."""

from __future__ import annotations

import math
import operator
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import cpu
from .checks import require_count
from .padding import zero_padding
from .watched import is_watched

ConvKind = Literal["1d", "2d"]
ConvSharing = Literal["none", "heads"]
"""The sharing of filters that leaves a convolution fit for what has a prefix."""
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
        self._require_filters(v)
        if v.shape[2] and self._runs_natively(v):
            return cpu.join(None, None, v, self.conv.weight, None, None, self._grid(v.shape[2], grid))
        return self._convolved(v, grid)

    def _convolved(self, v: Tensor, grid: tuple[int, int] | None) -> Tensor:
        """The definition, in PyTorch's operators."""
        batch, heads, length, dim = v.shape
        filters = self.conv.in_channels
        weight = self.conv.weight
        if self.sharing == "channels":  # heads are the channels already and head channels a second axis: no transpose
            pad = weight.shape[2] // 2
            return F.conv2d(v.to(weight.dtype), weight[..., None], padding=(pad, 0), groups=heads).to(v.dtype)
        # -1 for the images would make the exporter guess at divisibility by the length
        images = batch * heads * dim // filters
        channels_first = v.transpose(2, 3).reshape(images, filters, length).to(weight.dtype)
        if self.kind == "2d":
            channels_first = channels_first.unflatten(2, self._grid(length, grid))
        return self.conv(channels_first).to(v.dtype).reshape(batch, heads, dim, length).transpose(2, 3)

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
        nothing. A backend other than "cpu" rules its kernel out.
        """
        prefix = 0 if rows is None else rows.shape[2]
        self._require_filters(v)
        if backend in (None, "cpu") and out.shape[2] and self._runs_natively(rows, out, v):
            grid = self._grid(v.shape[2] - prefix, grid)
            return cpu.join(out, rows, v, self.conv.weight, query_mask, key_mask, grid)
        if out.shape[2]:  # PyTorch refuses to convolve nothing
            mixed = self._convolved(zero_padding(v, key_mask)[:, :, prefix:], grid)
            out = out + zero_padding(mixed, None if query_mask is None else query_mask[:, prefix:])
        if rows is None:
            return out
        return torch.cat([zero_padding(rows, None if query_mask is None else query_mask[:, :prefix]), out], 2)

    def _runs_natively(self, *tensors: Tensor | None) -> bool:
        if self.sharing == "channels" or type(self.conv) not in (nn.Conv1d, nn.Conv2d) or is_watched(self.conv):
            return False
        return cpu.can_join(self.conv.weight, *tensors)

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
