"""Padding in mechanisms: padded content is replaced before it can meet real content."""

from __future__ import annotations

import torch
from torch import Tensor

from ..nn.padding import zero_padding as zero_padding


def count_real(x: Tensor, mask: Tensor | None) -> Tensor:
    """The number of real tokens of `x (B, H, N, D)` as `(B or 1, 1, 1, 1)` in the dtype of `x`; at least 1."""
    if mask is None:
        return x.new_full((1, 1, 1, 1), x.shape[2])
    return mask.sum(-1).clamp_min(1).to(x.dtype)[:, None, None, None]


def rank_among_real(x: Tensor, mask: Tensor | None) -> Tensor:
    """The place of each real token of `x (B, H, N, D)` among the real ones, from 0: `(B or 1, N)` integers.

    Counting real tokens only is what makes a padded sequence equal the truncated one, wherever its padding is.
    """
    if mask is None:
        return torch.arange(x.shape[2], device=x.device)[None]
    return mask.cumsum(-1) - 1


def require_equal_lengths(q: Tensor, k: Tensor, name: str, reason: str = "it is defined within one sequence") -> None:
    """Refuse cross-attention where the mechanism is only defined among one set of tokens."""
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"{name} needs as many keys as queries ({reason}), got {q.shape[2]} queries and {k.shape[2]} keys."
        )


def shared_mask(key_mask: Tensor | None, query_mask: Tensor | None) -> Tensor | None:
    """Tokens that are real on both sides, for self-attention in which a token cannot be only a query or only a key."""
    if key_mask is None or query_mask is None:
        return query_mask if key_mask is None else key_mask
    return key_mask & query_mask


def either_mask(key_mask: Tensor | None, query_mask: Tensor | None) -> Tensor | None:
    """Tokens that are real on some side: the others are nowhere looked at."""
    return None if key_mask is None or query_mask is None else key_mask | query_mask
