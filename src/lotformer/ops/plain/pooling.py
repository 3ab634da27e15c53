"""Rows of a prefix that score like and opposite signs apart."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..padding import zero_padding
from ..precision import no_autocast


def pool(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, beta: float, powers: tuple[float, float]) -> Tensor:
    k, v = zero_padding(k, key_mask), zero_padding(v, key_mask)
    dtype = torch.promote_types(q.dtype, torch.float32)
    with no_autocast(q.device.type):  # powers of rounded scores are other rows
        scores = _polarized_scores(beta * q.to(dtype), k.to(dtype), powers)
    return pool_by_scores(scores, v, key_mask)


def pool_by_scores(scores: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """Rows `(B, H, P, Dv)` for finite scores `(B, H, P, M)` with all keys; padded values are clean."""
    if key_mask is None:
        return scores.softmax(-1).to(v.dtype) @ v
    allowed = key_mask[:, None, None, :]
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    return (scores.softmax(-1).to(v.dtype) @ v).masked_fill(~allowed.any(-1, keepdim=True), 0.0)


def _polarized_scores(q: Tensor, k: Tensor, powers: tuple[float, float]) -> Tensor:
    q_pos, q_neg, k_pos, k_neg = F.relu(q), F.relu(-q), F.relu(k), F.relu(-k)
    like = q_pos @ k_pos.mT + q_neg @ k_neg.mT
    opposite = q_pos @ k_neg.mT + q_neg @ k_pos.mT
    # a power below one has no slope at zero
    like, opposite = like.clamp_min(1e-6), opposite.clamp_min(1e-6)
    return like ** powers[0] + opposite ** powers[1]
