"""Groups of keys that are read through one centre: by assignment and mean, as the queries see them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..padding import zero_padding

SAMPLED = 8
"""Queries for each dimension that tell how queries see keys: more of them tell the same."""


@torch.no_grad()
def find_groups(
    q: Tensor, k: Tensor, query_mask: Tensor | None, key_mask: Tensor | None, rank: int, steps: int
) -> Tensor:
    """The group of every key `(B, H, M)`, an integer below `rank`; of padding it is `rank`.

    With `G = Σ_i q_i q_iᵀ` over real queries, evenly sampled if they are many, two keys are as far from each other as
    their scores with these queries: `(k - c)ᵀ G (k - c)`. From keys drawn evenly along the sequence, each step sends
    every key to the nearest centre and moves the centres to the means of their keys. A centre without keys stays where
    it is; the first of equal ones wins.
    """
    if not q.shape[2] or not k.shape[2]:
        return k.new_zeros(k.shape[:3], dtype=torch.int64)
    wide = torch.float64 if q.device.type == "cpu" else torch.promote_types(q.dtype, torch.float32)
    q = _within_one(_sampled(q, query_mask).to(wide))
    k = _within_one(_centred(zero_padding(k, key_mask).to(wide), key_mask))
    metric = q.mT @ q
    centres = k.gather(2, _starts(k, key_mask, rank)[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[3]))
    groups = k.new_zeros(k.shape[:3], dtype=torch.int64)
    for step in range(steps):
        seen = centres @ metric
        # compared in fp32: equal centres have to tie, however the products of a batch are summed
        nearness = k @ seen.mT - 0.5 * (centres * seen).sum(-1)[:, :, None]
        groups = nearness.float().argmax(-1)
        if key_mask is not None:
            groups = groups.masked_fill(~key_mask[:, None], rank)
        if step < steps - 1:
            member = one_hot(groups, rank, wide)
            size = member.sum(2)[..., None]
            centres = torch.where(size > 0, member.mT @ k / size.clamp_min(1), centres)
    return groups


def _sampled(q: Tensor, query_mask: Tensor | None) -> Tensor:
    """At least `SAMPLED` real queries for each dimension, evenly along the sequence, if there are so many."""
    enough = SAMPLED * q.shape[3]
    if query_mask is None:
        return q[:, :, :: max(q.shape[2] // enough, 1)]
    step = (query_mask.sum(-1, keepdim=True) // enough).clamp_min(1)
    return zero_padding(q, query_mask & ((query_mask.cumsum(-1) - 1) % step == 0))


def one_hot(groups: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """`(B, H, M, rank)`; padding is in no group."""
    return F.one_hot(groups, rank + 1)[..., :rank].to(dtype)


def _starts(k: Tensor, key_mask: Tensor | None, rank: int) -> Tensor:
    """Places `(B, rank)` of keys drawn evenly from the real ones."""
    batch, _, length, _ = k.shape
    step = torch.arange(rank, device=k.device)
    if key_mask is None:
        return (step * (length - 1) // max(rank - 1, 1)).expand(batch, -1)
    count = key_mask.sum(-1, keepdim=True)
    places = (~key_mask).to(torch.int8).argsort(dim=-1, stable=True)  # those of real keys first, in order
    return places.gather(-1, (step * (count - 1).clamp_min(0)) // max(rank - 1, 1))


def _centred(k: Tensor, key_mask: Tensor | None) -> Tensor:
    """Keys around their mean, which no distance depends on, but what is left of it after rounding does."""
    if key_mask is None:
        return k - k.mean(2, keepdim=True)
    count = key_mask.sum(-1).clamp_min(1)[:, None, None, None]
    return zero_padding(k - k.sum(2, keepdim=True) / count, key_mask)


def _within_one(x: Tensor) -> Tensor:
    """Rows divided by the largest number of their head, so that no square overflows; groups do not depend on it."""
    largest = x.abs().amax((2, 3), keepdim=True)
    return x / torch.where(largest > 0, largest, 1.0)
