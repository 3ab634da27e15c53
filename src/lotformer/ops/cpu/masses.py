"""Learned masses of keys, as one operator of the CPU kernel."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .operators import FLOAT, MAX_WIDTH, differentiable_once, rows, why_not_here


def run(
    q: Tensor | None,
    k: Tensor,
    direction: Tensor,
    query_weight: Tensor | None,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
) -> Tensor:
    """`beside.key_masses` in one pass over queries and keys."""
    if query_weight is None:
        q = query_mask = None
    return _operator(
        q=None if q is None else rows(q),
        k=rows(k),
        direction=direction,
        query_weight=query_weight,
        query_mask=query_mask,
        key_mask=key_mask,
    )[0]


def why_unsupported(
    q: Tensor | None, k: Tensor, direction: Tensor, query_weight: Tensor | None, *rest: Any
) -> str | None:
    if not 0 < k.shape[3] <= MAX_WIDTH:
        return f"it takes head dimensions from 1 to {MAX_WIDTH}, got {k.shape[3]}."
    return why_not_here(FLOAT, q, k, direction, query_weight)


_operator = differentiable_once("key_masses", advice="Use float64, which runs in plain PyTorch.")
