"""How operators of the extension are called: eagerly, traced, and by autograd; and what they share in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Operator = Callable[..., Any]


def why_transformed() -> str | None:
    """Why a call from here has to be left to PyTorch's own operators, or None."""
    if not torch.compiler.is_compiling() and torch._C._functorch.maybe_current_level() is not None:
        return "it has no rules for torch.func transforms."
    if torch.autograd.forward_ad._current_level >= 0:
        return "it has no forward-mode derivative."
    return None


# What `torch.library` registers for autograd serves tracing, but costs as much as a small call. Eager calls go past it.


def differentiable(name: str, tensors: int, setup_context: Operator, backward: Operator) -> Operator:
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


def plain(name: str) -> Operator:
    """The operator for the backward of another: autograd hears of it only if a second derivative may be asked for."""
    operator = getattr(torch.ops.lotformer, name)
    direct = operator.default._op

    def call(*inputs: Any) -> Any:
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return operator(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return direct(*inputs)

    return call


def no_second_derivative(name: str, advice: str) -> None:
    """Let the operator say so when it is differentiated."""

    def refuse(ctx: Any, *grads: Any) -> None:
        raise NotImplementedError(advice)

    torch.library.register_autograd(f"lotformer::{name}", refuse)


def rows(x: Tensor) -> Tensor:
    """The kernels read any layout whose last dimension is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def fresh_like(x: Tensor) -> Tensor:
    """`empty_like`, or contiguous where that has no whole rows: for tokens that overlap in memory."""
    y = torch.empty_like(x)
    return y if y.shape[3] == 1 or y.stride(3) == 1 else x.new_empty(x.shape)
