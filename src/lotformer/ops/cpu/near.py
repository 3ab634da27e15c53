"""Softmax over the keys near a query, as one operator of the CPU kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .operators import differentiable_once, fresh_like, output_like, rows, takes


class _Tensors(NamedTuple):
    """The tensors of `near_forward` in its order: those with gradients first, as `near_backward` returns them."""

    q: Tensor
    k: Tensor
    v: Tensor
    direction: Tensor
    offset: Tensor
    query_mask: Tensor | None
    key_mask: Tensor | None


class Reach(NamedTuple):
    """How far a token sees on a grid of so many columns, each way; a sequence is one row."""

    columns: int
    rows_around: int
    columns_around: int


def can_read_near_keys(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `read_near_keys` runs here and now."""
    suited = takes(q, k, v, dtypes=(torch.float32, torch.bfloat16))
    return suited and q.dtype == k.dtype == v.dtype and min(q.shape[3], v.shape[3]) >= 1


def read_near_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    direction: Tensor,
    offset: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    reach: Reach,
) -> tuple[Tensor, Tensor]:
    """Softmax of each query over the prefix and its window of keys, and `σ(log-sum − q·direction − offset)`.

    Padding is never read; a query that is padding, or has no real key, reads zeros and has the share 0.

    Args:
        q: `(B, H, N, D)`. k, v: `(B, H, P + N, ·)`, the P keys of the prefix in front. direction: `(B, H, D)`, offset:
            `(B, H)`, both fp32. query_mask: `(B, N)`. key_mask: `(B, P + N)`.
    """
    out, share, _ = _operator(rows(q), rows(k), rows(v), direction, offset, query_mask, key_mask, *reach)
    return out, share


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
