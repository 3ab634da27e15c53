"""Operators of the extension as differentiable functions.

What `torch.library` registers for autograd serves tracing, but costs as much as a small call. Eager calls go past it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

load_error: str | None = None
"""Why the extension cannot be used, None if it can."""

try:
    from . import _kernel  # noqa: F401  registers its operators
except ImportError as error:
    load_error = str(error)

MAX_WIDTH = 256
"""Largest rank and largest head dimension the kernel takes."""

Outputs = tuple[Tensor, ...]


class Differentiable:
    """An operator of the extension with another one as its derivative.

    It takes `tensors` tensors, some perhaps None, and then plain options; it returns a tuple of the output and of
    what is kept for backward. Its derivative takes the gradient of the output, what was kept, and all inputs again; it
    returns gradients of the first tensors in their order.

    Args:
        forward, backward: their names in `torch.ops.lotformer`.
        elsewhere: what to do where there is no second derivative.
        fakes: for operators that are traced, the shapes of their outputs and of those of their derivatives.
        keeps_output: whether the derivative wants the output too, before what was kept.
    """

    def __init__(
        self,
        forward: str,
        backward: str,
        tensors: int,
        elsewhere: str,
        *,
        fakes: tuple[Callable[..., Outputs], Callable[..., Outputs]] | None = None,
        keeps_output: bool = False,
    ) -> None:
        self.tensors, self.first_kept = tensors, 0 if keeps_output else 1
        if load_error is not None:
            return
        self._traced, self._traced_backward = (getattr(torch.ops.lotformer, name) for name in (forward, backward))
        self._run, self._run_backward = (x.default._op for x in (self._traced, self._traced_backward))
        self._eager = _eager(self)
        if fakes is not None:
            for name, fake in zip((forward, backward), fakes, strict=True):
                torch.library.register_fake(f"lotformer::{name}", fake)
            torch.library.register_autograd(f"lotformer::{forward}", self._backward, setup_context=self._keep)

        def refuse(ctx: Any, *grads: Any) -> None:
            raise NotImplementedError(f"the CPU kernel has no second derivative. {elsewhere}")

        torch.library.register_autograd(f"lotformer::{backward}", refuse)

    def __call__(self, *inputs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._traced(*inputs)
        if torch.is_grad_enabled():
            for x in inputs[: self.tensors]:
                if x is not None and x.requires_grad:
                    return self._eager.apply(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return self._run(*inputs)

    def _keep(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        kept = output[self.first_kept :]
        ctx.options, ctx.kept = inputs[self.tensors :], len(kept)
        ctx.save_for_backward(*kept, *inputs[: self.tensors])
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    def _backward(self, ctx: Any, grad: Tensor | None, *unused: Any) -> tuple[Tensor | None, ...]:
        nothing = (None,) * (self.tensors + len(ctx.options))
        if grad is None:  # whatever came after the output did not depend on it
            return nothing
        tensors = ctx.saved_tensors[ctx.kept :]
        arguments = (grad, *ctx.saved_tensors, *ctx.options)
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            grads = self._traced_backward(*arguments)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                grads = self._run_backward(*arguments)
        wanted = (None if x is None else g for x, g in zip(tensors, grads, strict=False))
        return (*wanted, *nothing[len(grads) :])


def _eager(operator: Differentiable) -> type[torch.autograd.Function]:
    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                output = operator._run(*inputs)
            operator._keep(ctx, inputs, output)  # torch would inspect a signature at every call to do this
            return output

        backward = staticmethod(operator._backward)

    return Eager


def why_unsuited(x: Tensor, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> str | None:
    """Why operators of the extension cannot be called with tensors like this one here and now; None if they can."""
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


def is_suited(*tensors: Tensor) -> bool:
    """Whether an operator beside the transport may take these fp32 tensors.

    Traced programs get plain PyTorch, which the compiler fuses and an exported program carries along.
    """
    if load_error is not None or torch.compiler.is_compiling():
        return False
    return all(x.numel() > 0 and why_unsuited(x) is None for x in tensors)


def rows(x: Tensor) -> Tensor:
    """The extension reads any layout whose last dimension is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()
