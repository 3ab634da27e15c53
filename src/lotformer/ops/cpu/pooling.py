"""Polarised rows of a prefix in one pass over keys and values: C++."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .calls import differentiable, fresh_like, no_second_derivative, plain, rows
from .op import takes, why_unavailable


def can_pool(*tensors: Tensor | None) -> bool:
    """Whether `pool` takes these queries, keys and values, here and now."""
    return takes(*tensors)


def pool(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, beta: float, powers: tuple[float, float]) -> Tensor:
    """Rows `(B, H, P, Dv)` for queries `(B, H, P, D)`, as `PrefixRows` defines them; padding may hold anything."""
    return _pool(rows(q), rows(k), rows(v), key_mask, beta, *powers)[0]


def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty((*q.shape[:3], k.shape[2]))


def _fake_backward(
    grad: Tensor, out: Tensor, plan: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), fresh_like(rows(k)), fresh_like(rows(v))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, key_mask, *ctx.options = inputs
    ctx.save_for_backward(*output, q, k, v, key_mask)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, *unused: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 7
    return (*_pool_backward(rows(grad), *ctx.saved_tensors, *ctx.options), None, None, None, None)


if why_unavailable() is None:
    torch.library.register_fake("lotformer::cpu_pool", _fake)
    torch.library.register_fake("lotformer::cpu_pool_backward", _fake_backward)
    _pool = differentiable("cpu_pool", 3, _setup_context, _backward)
    _pool_backward = plain("cpu_pool_backward")
    no_second_derivative(
        "cpu_pool_backward",
        'polarised prefix rows have no second derivative on the CPU kernel. Use `backend="reference"`.',
    )
