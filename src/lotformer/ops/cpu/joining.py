"""Prefix rows, and behind them coupled rows with a depthwise convolution of the values, in one pass: C++."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .operators import FLOAT, Signature, differentiable, fresh_like, load_error, plain, rows, why_not_here


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
    return _join(
        coupled=None if coupled is None else rows(coupled),
        prefix=None if prefix is None else rows(prefix),
        values=rows(values),
        filters=filters,
        query_mask=query_mask,
        key_mask=key_mask,
        rows=grid[0],
        columns=grid[1],
    )


def why_unsupported(
    coupled: Tensor | None, prefix: Tensor | None, values: Tensor, filters: Tensor, *rest: Any
) -> str | None:
    return why_not_here(FLOAT, coupled, prefix, values, filters)


def _fake_forward(values: Tensor, **rest: Any) -> Tensor:
    return fresh_like(rows(values))


def _fake_backward(values: Tensor, filters: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
    return fresh_like(rows(values)), torch.empty_like(filters, memory_format=torch.contiguous_format)


def _keep(ctx: Any, given: dict[str, Any]) -> None:
    ctx.names = [name for name, x in given.items() if isinstance(x, Tensor)]
    ctx.rest = {name: x for name, x in given.items() if name not in ctx.names}
    ctx.save_for_backward(*(given[name] for name in ctx.names))


def _kept(ctx: Any) -> dict[str, Any]:
    return ctx.rest | dict(zip(ctx.names, ctx.saved_tensors, strict=True))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    given = _FORWARD.named(inputs)
    ctx.coupled, prefix = given.pop("coupled") is not None, given["prefix"]
    _keep(ctx, given | {"prefix": 0 if prefix is None else prefix.shape[2]})


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    given = _kept(ctx) | {"grad": rows(grad)}
    grad, special, mask = given["grad"], given["prefix"], given["query_mask"]
    found = {}
    if ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
        found["values"], found["filters"] = _join_backward(**given)
    if special:
        prefix = grad[:, :, :special]
        found["prefix"] = prefix if mask is None else prefix.masked_fill(~mask[:, None, :special, None], 0.0)
    if ctx.coupled:
        found["coupled"] = grad[:, :, special:]
    return _FORWARD.ordered(found)


def _second_backward(ctx: Any, of_values: Tensor, of_filters: Tensor) -> tuple[Tensor | None, ...]:
    """The map is linear in the values and in the filters: its second derivatives are the same two operators."""
    given = _kept(ctx)
    grad, special = given.pop("grad"), given["prefix"]
    by_values, by_filters = given | {"values": rows(of_values)}, given | {"filters": of_filters}
    dvalues, dfilters = _join_backward(grad=grad, **by_filters)[0], _join_backward(grad=grad, **by_values)[1]
    nothing = {"coupled": None, "prefix": torch.zeros_like(grad[:, :, :special]) if special else None}
    dgrad = _join(**by_values | nothing) + _join(**by_filters | nothing)
    return _BACKWARD.ordered({"grad": dgrad, "values": dvalues, "filters": dfilters})


if load_error is None:
    _FORWARD, _BACKWARD = Signature("join_forward"), Signature("join_backward")
    _FORWARD.register_fake(_fake_forward)
    _BACKWARD.register_fake(_fake_backward)
    _join = differentiable(_FORWARD, _setup_context, _backward)
    _join_backward = _BACKWARD.by_name(plain(_BACKWARD))
    torch.library.register_autograd(
        _BACKWARD.name,
        _second_backward,
        setup_context=lambda ctx, inputs, output: _keep(ctx, _BACKWARD.named(inputs)),
    )
