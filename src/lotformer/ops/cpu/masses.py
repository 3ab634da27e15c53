"""Learned masses of keys by the extension: one pass over the queries and one over the keys."""

from __future__ import annotations

from torch import Tensor

from . import native


def suits(k: Tensor, direction: Tensor) -> bool:
    """Whether `key_masses` can be called here and now for these keys and this direction."""
    return k.shape[-1] <= native.MAX_WIDTH and native.is_suited(k, direction)


def key_masses(
    q: Tensor | None,
    k: Tensor,
    direction: Tensor,
    query_weight: Tensor | None,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
) -> Tensor:
    """`p_j ∝ exp(k_j·(w + α q̄ / √D)) (B, H, M)` for `w (H, D)` and `α (H,)`; q and α may both be missing."""
    return _key_masses(
        None if q is None else native.rows(q), native.rows(k), direction, query_weight, query_mask, key_mask
    )[0]


_key_masses = native.Differentiable(
    "cpu_key_masses",
    "cpu_key_masses_backward",
    6,
    "Use float64, which runs in plain PyTorch.",
    keeps_output=True,
)
