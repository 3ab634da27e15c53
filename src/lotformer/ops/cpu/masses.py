"""Learned masses of keys, as one operator of the CPU kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from .operators import MAX_WIDTH, differentiable_once, rows, takes


def can_weigh_keys(q: Tensor, k: Tensor, direction: Tensor) -> bool:
    """Whether `key_masses` runs here and now. Traced programs get plain PyTorch, which the compiler fuses."""
    if torch.compiler.is_compiling() or not takes(q, k, direction):
        return False
    return 0 < k.shape[3] <= MAX_WIDTH and k.shape[2] > 0


def key_masses(
    q: Tensor | None,
    k: Tensor,
    direction: Tensor,
    query_weight: Tensor | None,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
) -> Tensor:
    """`p_j ∝ exp(k_j·(w + α q̄ / √D)) (B, H, M)` for `w (H, D)` and `α (H,)`; q and α may both be missing."""
    return _operator(None if q is None else rows(q), rows(k), direction, query_weight, query_mask, key_mask)[0]


_operator = differentiable_once("key_masses", tensors=6, kept=0, advice="Use float64, which runs in plain PyTorch.")
