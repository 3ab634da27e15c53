"""Tokens in blocks, and softmax attention within them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..nn.softmax import fused_softmax


def into_blocks(x: Tensor, size: int) -> Tensor:
    """Tokens `(B, H, N, D)` as blocks `(B, H, T, size, D)`, the last one filled up with zeros."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % size)).unflatten(2, (-1, size))


def mask_into_blocks(mask: Tensor | None, like: Tensor, size: int) -> Tensor:
    """Real tokens in the blocks of `like (B, H, N, D)`, `(B or 1, T, size)`: in the sequence, no padding."""
    length = like.shape[2]
    if mask is None:
        mask = like.new_ones((1, length), dtype=torch.bool)
    return F.pad(mask, (0, -length % size)).unflatten(1, (-1, size))


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None = None, scale: float | None = None) -> Tensor:
    """Every block of queries `(B, H, T, c, D)` attends to its own block of keys `(B, H, T, m, D)`.

    `allowed` broadcasts to `(B, T, c, m)`. Returns `(B, H, T, c, Dv)`.
    """
    batch, _, blocks = q.shape[:3]
    if allowed is not None:
        shared = allowed.shape[:2] == (1, 1)
        allowed = (allowed[0] if shared else allowed.expand(batch, blocks, -1, -1).flatten(0, 1))[:, None]
    # blocks join the batch, so that a mask per block need not be repeated for every head
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    return fused_softmax(q, k, v, allowed, scale).unflatten(0, (batch, blocks)).transpose(1, 2)
