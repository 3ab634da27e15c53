"""Softmax for what is near and groups of keys for the rest, found and read in one operator: C++."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..plain.found import Found, Grouping
from ..plain.window import Reach
from .operators import FLOAT_OR_BFLOAT16, MAX_WIDTH, differentiable_once, fresh_like, output_like, rows, why_not_here

MOST_HEAVIEST = 8
"""Groups of a query whose keys may be read by content."""


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor | None,
    shift: Tensor | None,
    offset: Tensor | None,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    reach: Reach | None,
    grouping: Grouping,
    groups: Tensor | None,
) -> Found:
    """`found.found_attention`; the corrections are fp32."""
    columns = reach_rows = reach_columns = 0
    if reach is not None:
        columns, reach_columns = q.shape[2], reach.columns_around  # a sequence is one row
        if reach.grid is not None:
            columns, reach_rows = reach.grid[1], reach.rows_around
    gain, shift, offset = (None if x is None else x.float() for x in (gain, shift, offset))
    out, share, _, found = _operator(
        q=rows(q),
        k=rows(k),
        v=rows(v),
        gain=gain,
        shift=shift,
        offset=offset,
        query_mask=query_mask,
        key_mask=key_mask,
        groups=None if groups is None else groups.long(),
        **grouping._asdict(),
        columns=columns,
        reach_rows=reach_rows,
        reach_columns=reach_columns,
    )
    return Found(out, share, found)


def why_unsupported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor | None,
    shift: Tensor | None,
    offset: Tensor | None,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    reach: Reach | None,
    grouping: Grouping,
    groups: Tensor | None,
) -> str | None:
    if q.dtype != k.dtype or v.dtype != q.dtype:
        return "queries, keys and values have different dtypes."
    if not 1 <= q.shape[3] <= MAX_WIDTH or not 1 <= v.shape[3] <= MAX_WIDTH:
        return f"it takes head dimensions from 1 to {MAX_WIDTH}."
    if grouping.heaviest and grouping.most:
        if min(grouping.heaviest, grouping.rank) > MOST_HEAVIEST:
            return f"it reads the keys of at most {MOST_HEAVIEST} groups by content."
        tensors = (q, k, v, gain, shift, offset)
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
            return "it has no derivative of keys by content."
    return why_not_here(FLOAT_OR_BFLOAT16, q, k, v)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, prefix: int, **rest: Any) -> tuple[Tensor, ...]:
    share = q.new_empty(q.shape[:3], dtype=torch.float32)
    batch, heads, keys, _ = k.shape
    found = q.new_empty((batch, heads, keys - prefix), dtype=torch.int64)
    return output_like(q, v), share, torch.empty_like(share), found


def _fake_backward(q: Tensor, k: Tensor, v: Tensor, total: Tensor, **rest: Any) -> tuple[Tensor, ...]:
    heads, dim = q.shape[1], q.shape[3]
    small = (total.new_empty(shape) for shape in ((heads,), (heads, dim), (heads,)))
    return (*(fresh_like(rows(x)) for x in (q, k, v)), *small)


_operator = differentiable_once(
    "found",
    fakes=(_fake_forward, _fake_backward),
    advice='Use `backend="reference"`.',
)
