"""Rows of a prefix, and behind them coupled rows with a depthwise convolution of the values."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..padding import zero_padding


def join(
    coupled: Tensor | None,
    prefix: Tensor | None,
    values: Tensor,
    filters: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    grid: tuple[int, int],
    convolution: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    special = 0 if prefix is None else prefix.shape[2]
    out = coupled
    if values.shape[2] > special:  # PyTorch refuses to convolve nothing
        mixed = _convolved(zero_padding(values, key_mask)[:, :, special:], filters, grid, convolution)
        if coupled is None:
            out = mixed
        else:
            out = coupled + zero_padding(mixed, None if query_mask is None else query_mask[:, special:])
    elif out is None:
        out = values[:, :, special:]
    if prefix is None:
        return out
    return torch.cat([zero_padding(prefix, None if query_mask is None else query_mask[:, :special]), out], 2)


def _convolved(
    v: Tensor, filters: Tensor, grid: tuple[int, int], convolution: Callable[[Tensor], Tensor] | None
) -> Tensor:
    batch, heads, length, dim = v.shape
    count = filters.shape[0]
    # -1 for the images would make the exporter guess at divisibility by the length
    images = v.transpose(2, 3).reshape(batch * heads * dim // count, count, length).to(filters.dtype)
    if filters.dim() == 4:
        images = images.unflatten(2, grid)
    if convolution is None:
        convolve = F.conv2d if filters.dim() == 4 else F.conv1d
        mixed = convolve(images, filters, padding=filters.shape[-1] // 2, groups=count)
    else:
        mixed = convolution(images)
    return mixed.to(v.dtype).reshape(batch, heads, dim, length).transpose(2, 3)
