"""Softmax over the prefix and the keys around each query, by products with all candidates of a row."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..padding import zero_padding

CHUNK = 16
"""Tokens along a sequence that share their candidates: small wastes no products, large no calls."""


class Reach(NamedTuple):
    """The reach of a window each way, on a grid of rows and columns or, without one, on a sequence."""

    grid: tuple[int, int] | None
    rows_around: int
    columns_around: int


def read_window(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    direction: Tensor,
    offset: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    reach: Reach,
) -> tuple[Tensor | None, Tensor]:
    dtype = direction.dtype
    q, k, v = (
        zero_padding(q, query_mask).to(dtype),
        zero_padding(k, key_mask).to(dtype),
        v if v is None else zero_padding(v, key_mask),
    )
    batch, heads, length, dim = q.shape
    prefix = k.shape[2] - length
    real = k.new_ones(1, k.shape[2], dtype=torch.bool) if key_mask is None else key_mask
    rows, columns, around = _layout(length, reach)
    padding = rows * columns - length  # of the last row of a sequence; a grid is full
    q_rows = F.pad(q, (0, 0, 0, padding)).view(batch, heads, rows, columns, dim) * dim**-0.5
    near = _neighbours(k[:, :, prefix:], rows, columns, around)
    allowed = _neighbours(real[:, None, prefix:, None], rows, columns, around)[..., 0][..., None, :]
    index, inside = _places(columns, around, reach, q.device)
    scores = _picked(q_rows @ near.mT, index)
    inside = inside & _picked(allowed.expand(-1, -1, -1, columns, -1), index)
    # a large negative number, not -inf: a query without a real key must stay finite
    lowest = torch.finfo(dtype).min
    scores = scores.masked_fill(~inside, lowest)
    if prefix:
        special = q_rows.flatten(2, 3) @ k[:, :, :prefix].mT
        special = special.masked_fill(~real[:, None, None, :prefix], lowest).unflatten(2, (rows, columns))
        scores = torch.cat([special, scores], -1)
    total = scores.logsumexp(-1)
    rest = (q @ direction[..., None])[..., 0] + offset[..., None]
    share = (total.flatten(2)[:, :, :length] - rest).sigmoid()
    if v is None:
        return None, share
    weights = (scores - total[..., None]).exp().masked_fill(scores == lowest, 0.0).to(v.dtype)
    beside = _neighbours(v[:, :, prefix:], rows, columns, around)
    band = weights.new_zeros(*weights.shape[:-1], beside.shape[3])
    band = band.scatter_add(-1, index.expand(*weights.shape[:-1], -1), weights[..., prefix:])
    out = (band @ beside).flatten(2, 3)
    if prefix:
        out = out + weights[..., :prefix].flatten(2, 3) @ v[:, :, :prefix]
    return zero_padding(out[:, :, :length], query_mask), share


def _layout(length: int, reach: Reach) -> tuple[int, int, int]:
    """Tokens in rows and columns, and how many rows up and down a token may look."""
    if reach.grid is not None:
        return *reach.grid, reach.rows_around
    if torch.compiler.is_exporting():  # there are no chunks of a length that is not known
        return length, 1, reach.columns_around
    columns = max(CHUNK, reach.columns_around)
    return (length + columns - 1) // columns, columns, 1


def _places(columns: int, around: int, reach: Reach, device: torch.device) -> tuple[Tensor, Tensor]:
    """Positions of each token's window among the `(2 around + 1) · columns` candidates of its row, and whether each is
    inside the grid there: `(columns, window)`."""
    size = 2 * reach.columns_around + 1
    column, step = torch.arange(columns, device=device), torch.arange(size, device=device) - reach.columns_around
    place = column[:, None] + step
    if reach.grid is None:
        return place + around * columns, torch.ones_like(place, dtype=torch.bool)
    row = columns * torch.arange(2 * around + 1, device=device)
    index = place.clamp(0, columns - 1)[:, None] + row[:, None]
    return index.flatten(1), ((place >= 0) & (place < columns)).repeat(1, len(row))


def _picked(candidates: Tensor, index: Tensor) -> Tensor:
    """Of the candidates `(…, columns, n)` of every token, those in its window."""
    return candidates.gather(-1, index.expand(*candidates.shape[:-1], -1))


def _neighbours(x: Tensor, rows: int, columns: int, reach: int) -> Tensor:
    """The tokens of the rows around each row, `(B, H, rows, (2 reach + 1) · columns, D)`, for tokens `(B, H, N, D)`."""
    batch, heads, length, dim = x.shape
    x = F.pad(x, (0, 0, reach * columns, (rows + reach) * columns - length))
    around = x.view(batch, heads, rows + 2 * reach, columns, dim).unfold(2, 2 * reach + 1, 1)
    return around.permute(0, 1, 2, 5, 3, 4).reshape(batch, heads, rows, (2 * reach + 1) * columns, dim)
