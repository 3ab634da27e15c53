"""How operators of the extension become torch's: shapes for tracing, gradients, and a short way for eager calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

load_error: str | None = None
"""Why the extension is not there."""
try:
    from . import _kernel  # noqa: F401  importing it registers the operators
except ImportError as error:
    load_error = str(error)

MAX_WIDTH = 256
"""Largest rank and largest head dimension the kernels take."""

Outputs = tuple[Tensor, ...]


def why_not_here(x: Tensor) -> str | None:
    """Why no operator of the extension takes tokens like these now."""
    if x.device.type != "cpu":
        return f"it runs on the CPU and the tensors are on {x.device}."
    if x.dtype not in (torch.float32, torch.bfloat16):
        return f"it takes float32 and bfloat16, not {x.dtype}."
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
    """What the kernels allocate for a row of values for each query: in the layout of the queries."""
    batch, heads, n, dim = q.shape
    width = v.shape[3]
    if dim == width:
        return fresh_like(q)
    if q.stride(1) >= q.stride(2):
        return q.new_empty((batch, heads, n, width))
    return q.new_empty((batch, n, heads, width)).transpose(1, 2)


class Operator:
    """`lotformer::{name}_forward`, differentiable once by `lotformer::{name}_backward`.

    Args:
        tensors: how many inputs, the first ones, are tensors or None; gradients are for the first of them.
        advice: what to do who needs a second derivative.
        results: how many outputs, the first ones, have gradients.
        kept: the first output that backward wants, with all after it.
        gradients: `gradients(inputs, *grads)` is what backward takes for the gradients of these outputs, None where
            nothing depends on one. Its other arguments are what was kept, and the inputs.
        fakes: the shapes of the results of both, for operators that are traced.
    """

    def __init__(
        self,
        name: str,
        *,
        tensors: int,
        advice: str,
        results: int = 1,
        kept: int = 1,
        gradients: Callable[..., Outputs] = lambda inputs, grad: (rows(grad),),
        fakes: tuple[Callable[..., Outputs], Callable[..., Outputs]] | None = None,
    ) -> None:
        self._tensors = tensors
        if load_error is not None:
            return
        packets = [getattr(torch.ops.lotformer, f"{name}_{way}") for way in ("forward", "backward")]
        traced_forward, traced_backward = packets
        eager_forward, eager_backward = (packet.default._op for packet in packets)

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
            ctx.options = inputs[tensors:]
            ctx.save_for_backward(*output[kept:], *inputs[:tensors])
            ctx.mark_non_differentiable(*output[results:])
            ctx.set_materialize_grads(False)

        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            nothing = (None,) * (tensors + len(ctx.options))
            if all(grad is None for grad in grads):  # whatever came after the outputs did not depend on them
                return nothing
            inputs = ctx.saved_tensors[-tensors:]
            arguments = (*gradients(inputs, *grads[:results]), *ctx.saved_tensors, *ctx.options)
            if torch.compiler.is_compiling() or torch.is_grad_enabled():
                found = traced_backward(*arguments)
            else:
                with torch._C._AutoDispatchBelowAutograd():
                    found = eager_backward(*arguments)
            wanted = (None if x is None else g for x, g in zip(inputs, found, strict=False))
            return (*wanted, *nothing[len(found) :])

        def no_second_derivative(ctx: Any, *grads: Any) -> None:
            raise NotImplementedError(f"the CPU kernel has no second derivative. {advice}")

        class Eager(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: Any) -> Outputs:
                with torch._C._AutoDispatchBelowAutograd():
                    output = eager_forward(*inputs)
                setup_context(ctx, inputs, output)  # torch would inspect a signature at every call to do this
                return output

        Eager.backward = staticmethod(backward)  # type: ignore[method-assign]
        self._traced, self._bare, self._eager = traced_forward, eager_forward, Eager
        if fakes is not None:
            for way, fake in zip(("forward", "backward"), fakes, strict=True):
                torch.library.register_fake(f"lotformer::{name}_{way}", fake)
            torch.library.register_autograd(f"lotformer::{name}_forward", backward, setup_context=setup_context)
        torch.library.register_autograd(f"lotformer::{name}_backward", no_second_derivative)

    def __call__(self, *inputs: Any) -> Outputs:
        # what `torch.library` registers for autograd serves tracing, but costs as much as a small call
        if torch.compiler.is_compiling():
            return self._traced(*inputs)
        if torch.is_grad_enabled():
            for x in inputs[: self._tensors]:
                if x is not None and x.requires_grad:
                    return self._eager.apply(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return self._bare(*inputs)
