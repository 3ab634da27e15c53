"""Softmax attention over the allowed keys by PyTorch's fused kernels, for whoever needs rows of it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .padding import zero_padding


def fused_softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """`softmax(scale · q kᵀ) v` over the allowed keys, `(B, H, N, Dv)`; a query without any allowed key gives zeros.

    `allowed` is boolean and broadcasts to `(B, H, N, M)`; `scale` is `D^-1/2` by default. The fused kernels want one
    width for q, k and v, so the narrower ones are filled up with zeros, which changes neither scores nor values.
    """
    if allowed is None:
        return _fused(q, k, v, None, scale, dropout)
    has_key = allowed.any(-1, keepdim=True)
    return _fused(q, k, v, allowed | ~has_key, scale, dropout).masked_fill(~has_key, 0.0)


def softmax_of_real(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float | None = None) -> Tensor:
    """The same over the real keys of each sample, `key_mask (B, M)`; padded ones may hold anything."""
    if key_mask is None:
        return _fused(q, k, v, None, scale)
    some = key_mask | ~key_mask.any(-1, keepdim=True)  # where no key is real, all values are zero
    return _fused(q, zero_padding(k, key_mask), zero_padding(v, key_mask), some[:, None, None], scale)


def _fused(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, scale: float | None, dropout: float = 0.0
) -> Tensor:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    width, value_width = max(q.shape[-1], v.shape[-1]), v.shape[-1]
    if q.shape[-1] != value_width:
        q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, dropout_p=dropout, scale=scale)
    return out if value_width == width else out[..., :value_width]
