"""Softmax attention over the allowed keys by PyTorch's fused kernels, for whoever needs rows of it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


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
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    width, value_width = max(q.shape[-1], v.shape[-1]), v.shape[-1]
    q, k, v = (F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in (q, k, v))
    if allowed is None:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scale)[..., :value_width]
    has_key = allowed.any(-1, keepdim=True)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed | ~has_key, dropout_p=dropout, scale=scale)
    return out[..., :value_width].masked_fill(~has_key, 0.0)
