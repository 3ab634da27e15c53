"""Softmax for what is near and groups of keys for the rest, found and read in one operator: C++."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..plain.found import Found, Grouping
from ..plain.window import Reach
from .operators import FLOAT_OR_BFLOAT16, MAX_WIDTH, differentiable_once, fresh_like, output_like, rows, why_not_here

MOST_HEAVIEST = 8
"""Groups of a query whose keys may be read by content."""


class _Tensors(NamedTuple):
    """The tensors of `found_forward` in its order: those with gradients first, as `found_backward` returns them."""

    q: Tensor
    k: Tensor
    v: Tensor
    gain: Tensor | None
    shift: Tensor | None
    offset: Tensor | None
    query_mask: Tensor | None
    key_mask: Tensor | None
    groups: Tensor | None


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
    window = (0, 0, 0)
    counts = (grouping.prefix, grouping.rank, grouping.steps, grouping.heaviest, grouping.most)
    if reach is not None:
        columns = q.shape[2] if reach.grid is None else reach.grid[1]  # a sequence is one row
        window = (columns, 0 if reach.grid is None else reach.rows_around, reach.columns_around)
    gain, shift, offset = (None if x is None else x.float() for x in (gain, shift, offset))
    tensors = _Tensors(
        rows(q),
        rows(k),
        rows(v),
        gain,
        shift,
        offset,
        query_mask,
        key_mask,
        None if groups is None else groups.long(),
    )
    out, share, _, found = _operator(*tensors, *counts, *window)
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


def _fake_forward(*inputs: Any) -> tuple[Tensor, ...]:
    t = _Tensors(*inputs[:_COUNT])
    share = t.q.new_empty(t.q.shape[:3], dtype=torch.float32)
    batch, heads, keys, _ = t.k.shape
    found = t.q.new_empty((batch, heads, keys - inputs[_COUNT]), dtype=torch.int64)
    return output_like(t.q, t.v), share, torch.empty_like(share), found


def _fake_backward(grad: Tensor, total: Tensor, found: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    t = _Tensors(*inputs[:_COUNT])
    heads, dim = t.q.shape[1], t.q.shape[3]
    small = (total.new_empty(shape) for shape in ((heads,), (heads, dim), (heads,)))
    return (*(fresh_like(rows(x)) for x in (t.q, t.k, t.v)), *small)


_COUNT = len(_Tensors._fields)
_operator = differentiable_once(
    "found",
    tensors=_COUNT,
    kept=2,
    fakes=(_fake_forward, _fake_backward),
    advice='Use `backend="reference"`.',
)
