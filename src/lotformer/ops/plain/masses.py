"""Masses of keys as a function of keys and queries."""

from __future__ import annotations

import torch
from torch import Tensor

from ..precision import no_autocast


def key_masses(
    q: Tensor | None,
    k: Tensor,
    direction: Tensor,
    query_weight: Tensor | None,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
) -> Tensor:
    with no_autocast(k.device.type):
        mean_query = None if q is None or query_weight is None else mean_of_real(q, query_mask)
        vector = mass_directions(direction, query_weight, mean_query)
        k = k.to(vector.dtype)
        if key_mask is not None and torch.is_grad_enabled():  # for the gradient of the direction: 0 · NaN is NaN
            k = k.masked_fill(~key_mask[:, None, :, None], 0.0)
        return masses_of((k @ vector[..., None])[..., 0], key_mask)


def mass_directions(direction: Tensor, query_weight: Tensor | None, mean_query: Tensor | None) -> Tensor:
    """The direction that turns the keys of a head into logits, `w + α q̄ / √D`: `(B or 1, H, D)`."""
    direction = direction[None]
    if query_weight is None or mean_query is None:
        return direction
    return direction + query_weight[:, None] * direction.shape[-1] ** -0.5 * mean_query.to(direction.dtype)


def masses_of(logits: Tensor, key_mask: Tensor | None) -> Tensor:
    """Masses `(B, H, M)` from their logits, sum 1 over real keys."""
    if key_mask is not None:
        # a large negative number, not -inf: a sample of padding alone must stay finite
        logits = logits.masked_fill(~key_mask[:, None, :], torch.finfo(logits.dtype).min)
    return logits.softmax(-1)


def mean_of_real(x: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over real tokens of `x (B, H, N, D)`, in at least fp32: `(B, H, D)`; 0 where there are none."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if mask is None:
        return x.mean(-2)
    real = mask[:, None, :, None]
    return x.masked_fill(~real, 0.0).sum(-2) / real.sum(-2).clamp_min(1)
