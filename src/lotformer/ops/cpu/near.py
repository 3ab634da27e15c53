"""Softmax over the keys near a query, as one operator of the CPU kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..plain.window import Reach
from .operators import FLOAT_OR_BFLOAT16, differentiable_once, fresh_like, output_like, rows, why_not_here


class _Tensors(NamedTuple):
    """The tensors of `near_forward` in its order: those with gradients first, as `near_backward` returns them."""

    q: Tensor
    k: Tensor
    v: Tensor
    direction: Tensor
    offset: Tensor
    query_mask: Tensor | None
    key_mask: Tensor | None


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
        rows(q),
        k,
        k if v is None else rows(v),
        direction,
        offset,
        query_mask,
        key_mask,
        columns,
        reach.rows_around,
        reach.columns_around,
    )
    return (None if v is None else out), share


def why_unsupported(q: Tensor, k: Tensor, v: Tensor | None, *rest: Any) -> str | None:
    if q.dtype != k.dtype or (v is not None and v.dtype != q.dtype):
        return "queries, keys and values have different dtypes."
    if q.shape[3] < 1 or (v is not None and v.shape[3] < 1):
        return "it takes head dimensions of at least 1."
    return why_not_here(FLOAT_OR_BFLOAT16, q, k, v)


def _gradients(inputs: tuple[Any, ...], grad: Tensor | None, grad_share: Tensor | None) -> tuple[Tensor, Tensor]:
    t = _Tensors(*inputs)
    batch, heads, n, _ = t.q.shape
    if grad is None:
        grad = t.v.new_zeros((batch, heads, n, t.v.shape[3]))
    if grad_share is None:
        grad_share = t.offset.new_zeros((batch, heads, n))
    return rows(grad), grad_share


def _fake_forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    t = _Tensors(*inputs[:_COUNT])
    share = t.q.new_empty(t.q.shape[:3], dtype=torch.float32)
    return output_like(t.q, t.v), share, torch.empty_like(share)


def _fake_backward(grad: Tensor, grad_share: Tensor, share: Tensor, total: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    t = _Tensors(*inputs[:_COUNT])
    small = (x.new_empty(x.shape) for x in (t.direction, t.offset))
    return (*(fresh_like(rows(x)) for x in (t.q, t.k, t.v)), *small)


_COUNT = len(_Tensors._fields)
_operator = differentiable_once(
    "near",
    tensors=_COUNT,
    results=2,
    gradients=_gradients,
    fakes=(_fake_forward, _fake_backward),
    advice="Convert the tensors to float64: what then runs in PyTorch has one.",
)
