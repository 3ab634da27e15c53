"""Softmax over the keys near a query, as one operator of the CPU kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..plain.window import Reach
from .operators import FLOAT_OR_BFLOAT16, differentiable_once, fresh_like, output_like, rows, why_not_here


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    direction: Tensor,
    offset: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    reach: Reach,
) -> tuple[Tensor | None, Tensor]:
    """`beside.window`; the direction and the offset are fp32."""
    k = rows(k)
    columns = max(q.shape[2], 1) if reach.grid is None else reach.grid[1]  # a sequence is one row
    out, share, _ = _operator(
        q=rows(q),
        k=k,
        v=k if v is None else rows(v),
        direction=direction,
        offset=offset,
        query_mask=query_mask,
        key_mask=key_mask,
        columns=columns,
        reach_rows=reach.rows_around,
        reach_columns=reach.columns_around,
    )
    return (None if v is None else out), share


def why_unsupported(q: Tensor, k: Tensor, v: Tensor | None, *rest: Any) -> str | None:
    if q.dtype != k.dtype or (v is not None and v.dtype != q.dtype):
        return "queries, keys and values have different dtypes."
    if q.shape[3] < 1 or (v is not None and v.shape[3] < 1):
        return "it takes head dimensions of at least 1."
    return why_not_here(FLOAT_OR_BFLOAT16, q, k, v)


def _fake_forward(q: Tensor, v: Tensor, **rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    share = q.new_empty(q.shape[:3], dtype=torch.float32)
    return output_like(q, v), share, torch.empty_like(share)


def _fake_backward(
    q: Tensor, k: Tensor, v: Tensor, direction: Tensor, offset: Tensor, **rest: Any
) -> tuple[Tensor, ...]:
    small = (x.new_empty(x.shape) for x in (direction, offset))
    return (*(fresh_like(rows(x)) for x in (q, k, v)), *small)


_operator = differentiable_once(
    "near",
    fakes=(_fake_forward, _fake_backward),
    advice="Convert the tensors to float64: what then runs in PyTorch has one.",
)
