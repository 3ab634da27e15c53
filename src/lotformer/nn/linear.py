"""The contraction behind every kernel attention: linear in the tokens because it never forms the matrix."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_attention(
    phi_q: Tensor,
    phi_k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None = None,
    eps: float | Tensor = 0.0,
    floor: float = 0.0,
    normalize: bool = True,
) -> Tensor:
    """`phi_q (phi_kᵀ v) / max(phi_q · Σ_j phi_k_j + eps, floor)`, or without the denominator.

    Args:
        phi_q: features of the queries `(B, H, N, F)`. phi_k: features of the keys `(B, H, M, F)`.
        v: values `(B, H, M, Dv)`. key_mask: `(B, M)`, True = a real key; features of the others do not count.

    A query whose features meet no key (denominator 0) gets zero, with a finite gradient.
    """
    if key_mask is not None:
        phi_k = phi_k.masked_fill(~key_mask[:, None, :, None], 0.0)
    out = phi_q @ (phi_k.mT @ v)
    if not normalize:
        return out
    normalizer = phi_q @ phi_k.sum(-2)[..., None] + eps
    if floor > 0:
        return out / normalizer.clamp_min(floor)
    return out / torch.where(normalizer == 0, 1.0, normalizer)
