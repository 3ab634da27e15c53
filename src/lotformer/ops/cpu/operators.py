"""Registration of the kernels with torch: shapes for tracing, gradients, and a short way for eager calls."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

load_error: str | None = None
"""The reason why the extension is missing."""
if find_spec(f"{__package__}._kernel") is None:
    load_error = "nothing was compiled when the package was installed, as where there is no C++ compiler"
else:
    try:
        from . import _kernel  # noqa: F401  importing it registers the operators
    except ImportError as error:
        load_error = str(error)

MAX_WIDTH = 256
"""Largest rank and largest head dimension the kernels take."""

Outputs = tuple[Tensor, ...]
Call = Callable[..., Any]


FLOAT = (torch.float32,)
FLOAT_OR_BFLOAT16 = (torch.float32, torch.bfloat16)


def why_unavailable() -> str | None:
    if load_error is None:
        return None
    return (
        f"the CPU kernel is not built ({load_error}). Install a C++ compiler and type `pip install --force-reinstall "
        "--no-deps --no-build-isolation .` in the folder of the sources, or go on with the slower reference path."
    )


def why_not_here(dtypes: tuple[torch.dtype, ...], *tensors: Tensor | None) -> str | None:
    """The reason why no operator of the extension takes these tensors now."""
    for x in tensors:
        if x is None:
            continue
        if x.device.type != "cpu":
            return f"it runs on the CPU and the tensors are on {x.device}."
        if x.dtype not in dtypes:
            known = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            return f"it takes {known}, not {x.dtype}."
    if not torch.compiler.is_compiling() and torch._C._functorch.maybe_current_level() is not None:
        return "it has no rules for torch.func transforms."
    if torch.autograd.forward_ad._current_level >= 0:
        return "it has no forward-mode derivative."
    return None


def rows(x: Tensor) -> Tensor:
    """The kernels read any layout whose last dimension is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def fresh_like(x: Tensor) -> Tensor:
    """`empty_like`, or contiguous where that has no whole rows: for tokens that overlap in memory."""
    y = torch.empty_like(x)
    return y if y.shape[3] == 1 or y.stride(3) == 1 else x.new_empty(x.shape)


def output_like(q: Tensor, v: Tensor) -> Tensor:
    """A tensor for a row of values per query, in the layout of the queries."""
    batch, heads, n, dim = q.shape
    width = v.shape[3]
    if dim == width:
        return fresh_like(q)
    if q.stride(1) >= q.stride(2):
        return q.new_empty((batch, heads, n, width))
    return q.new_empty((batch, n, heads, width)).transpose(1, 2)


# What `torch.library` registers for autograd serves tracing, but costs as much as a small call. Eager calls go past it.


def differentiable(name: str, tensors: int, setup_context: Call, backward: Call) -> Call:
    """The operator with a derivative: its first inputs, so many, are tensors or None."""
    operator = getattr(torch.ops.lotformer, name)
    direct = operator.default._op
    torch.library.register_autograd(f"lotformer::{name}", backward, setup_context=setup_context)

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                output = direct(*inputs)
            setup_context(ctx, inputs, output)  # torch would inspect a signature at every call to do this
            return output

    Eager.backward = staticmethod(backward)  # type: ignore[method-assign]

    def call(*inputs: Any) -> Any:
        if torch.compiler.is_compiling():
            return operator(*inputs)
        if torch.is_grad_enabled():
            for x in inputs[:tensors]:
                if x is not None and x.requires_grad:
                    return Eager.apply(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return direct(*inputs)

    return call


def plain(name: str) -> Call:
    """The operator for the backward of another: autograd hears of it only if a second derivative may be asked for."""
    operator = getattr(torch.ops.lotformer, name)
    direct = operator.default._op

    def call(*inputs: Any) -> Any:
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return operator(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return direct(*inputs)

    return call


def register_fakes(name: str, forward: Call, backward: Call) -> None:
    """The shapes of the results of both ways, for tracing."""
    torch.library.register_fake(f"lotformer::{name}_forward", forward)
    torch.library.register_fake(f"lotformer::{name}_backward", backward)


def differentiable_once(
    name: str,
    *,
    tensors: int,
    advice: str,
    fakes: tuple[Call, Call] | None = None,
    results: int = 1,
    kept: int = 1,
    gradients: Callable[..., Outputs] = lambda inputs, grad: (rows(grad),),
) -> Call:
    """`lotformer::{name}_forward` with `lotformer::{name}_backward` for its derivative.

    Backward takes gradients of outputs, the outputs that were kept and all inputs, and returns gradients of the first
    inputs.

    Args:
        tensors: how many inputs, the first ones, are tensors or None.
        advice: what to do who needs a second derivative.
        fakes: shapes of the results of both, if they are ever traced.
        results: how many outputs, the first ones, have gradients.
        kept: the first output that backward wants; it gets all after it.
        gradients: `gradients(inputs, *grads)` is what backward takes for the gradients of these outputs, None where
            nothing depends on one.
    """
    if load_error is not None:
        return _missing
    derivative = plain(f"{name}_backward")

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
        ctx.options = inputs[tensors:]
        ctx.save_for_backward(*output[kept:], *inputs[:tensors])
        ctx.mark_non_differentiable(*output[results:])
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        nothing = (None,) * (tensors + len(ctx.options))
        if all(grad is None for grad in grads):  # whatever came after the outputs did not depend on them
            return nothing
        saved = ctx.saved_tensors  # read once: with activation checkpointing a tensor can be unpacked only once
        inputs = saved[-tensors:]
        found = derivative(*gradients(inputs, *grads[:results]), *saved, *ctx.options)
        wanted = (None if x is None else g for x, g in zip(inputs, found, strict=False))
        return (*wanted, *nothing[len(found) :])

    def refuse(ctx: Any, *grads: Any) -> None:
        raise NotImplementedError(f"the CPU kernel has no second derivative. {advice}")

    if fakes is not None:
        register_fakes(name, *fakes)
    torch.library.register_autograd(f"lotformer::{name}_backward", refuse)
    return differentiable(f"{name}_forward", tensors, setup_context, backward)


def _missing(*inputs: Any) -> Any:
    raise RuntimeError(f"the CPU kernel is not built ({load_error}).")
