"""Prefix rows, and behind them coupled rows with a depthwise convolution of the values, in one pass: C++."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .operators import FLOAT, differentiable, fresh_like, load_error, plain, register_fakes, rows, why_not_here


def run(
    coupled: Tensor | None,
    prefix: Tensor | None,
    values: Tensor,
    filters: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    grid: tuple[int, int],
    convolution: None = None,
) -> Tensor:
    """`beside.join` in the layout of the values."""
    given = [None if x is None else rows(x) for x in (coupled, prefix, values)]
    return _join(*given, filters, query_mask, key_mask, *grid)


def why_unsupported(
    coupled: Tensor | None, prefix: Tensor | None, values: Tensor, filters: Tensor, *rest: Any
) -> str | None:
    return why_not_here(FLOAT, coupled, prefix, values, filters)


def _fake(coupled: Tensor | None, prefix: Tensor | None, values: Tensor, *rest: Any) -> Tensor:
    return fresh_like(rows(values))


def _fake_backward(grad: Tensor, prefix: int, values: Tensor, filters: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return fresh_like(rows(values)), torch.empty_like(filters, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    coupled, prefix, values, filters, query_mask, key_mask, *ctx.grid = inputs
    ctx.coupled, ctx.prefix = coupled is not None, 0 if prefix is None else prefix.shape[2]
    ctx.save_for_backward(values, filters, query_mask, key_mask)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    values, filters, query_mask, key_mask = ctx.saved_tensors
    grad, special = rows(grad), ctx.prefix
    dvalues = dfilters = None
    if ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
        dvalues, dfilters = _join_backward(grad, special, values, filters, query_mask, key_mask, *ctx.grid)
    prefix = None
    if special:
        prefix = grad[:, :, :special]
        if query_mask is not None:
            prefix = prefix.masked_fill(~query_mask[:, None, :special, None], 0.0)
    return grad[:, :, special:] if ctx.coupled else None, prefix, dvalues, dfilters, None, None, None, None


def _setup_second(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    grad, ctx.prefix, values, filters, query_mask, key_mask, *ctx.grid = inputs
    ctx.save_for_backward(grad, values, filters, query_mask, key_mask)


def _second_backward(ctx: Any, of_values: Tensor, of_filters: Tensor) -> tuple[Tensor | None, ...]:
    """The map is linear in the values and in the filters: its second derivatives are the same two operators."""
    grad, values, filters, query_mask, key_mask = ctx.saved_tensors
    rest = (query_mask, key_mask, *ctx.grid)
    nothing = values.new_zeros((*values.shape[:2], ctx.prefix, values.shape[3])) if ctx.prefix else None
    dgrad = _join(None, nothing, rows(of_values), filters, *rest) + _join(None, nothing, values, of_filters, *rest)
    dvalues, _ = _join_backward(grad, ctx.prefix, values, of_filters, *rest)
    _, dfilters = _join_backward(grad, ctx.prefix, rows(of_values), filters, *rest)
    return dgrad, None, dvalues, dfilters, None, None, None, None


if load_error is None:
    register_fakes("join", _fake, _fake_backward)
    _join = differentiable("join_forward", 4, _setup_context, _backward)
    _join_backward = plain("join_backward")
    torch.library.register_autograd("lotformer::join_backward", _second_backward, setup_context=_setup_second)
