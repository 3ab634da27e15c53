"""PyTorch's fused softmax attention, on whole sequences and on blocks of tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def fused_softmax(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None = None, scale: float | None = None) -> Tensor:
    """`softmax(scale · q kᵀ) v` over the allowed keys, `(B, H, N, Dv)`; a query without any allowed key gives zeros.

    `allowed` is boolean and broadcasts to `(B, H, N, M)`. The fused kernels want one width for q, k and v, so the
    narrower ones are filled up with zeros, which changes neither scores nor values.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    width, value_width = max(q.shape[-1], v.shape[-1]), v.shape[-1]
    q, k, v = (F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in (q, k, v))
    if allowed is None:
        return F.scaled_dot_product_attention(q, k, v, scale=scale)[..., :value_width]
    has_key = allowed.any(-1, keepdim=True)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed | ~has_key, scale=scale)
    return out[..., :value_width].masked_fill(~has_key, 0.0)


def into_blocks(x: Tensor, size: int) -> Tensor:
    """Tokens `(B, H, N, D)` as blocks `(B, H, T, size, D)`, the last one filled up with zeros."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % size)).unflatten(2, (-1, size))


def mask_into_blocks(mask: Tensor | None, like: Tensor, size: int) -> Tensor:
    """Which tokens of the blocks of `like (B, H, N, D)` are real, `(B or 1, T, size)`: in the sequence, no padding."""
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
