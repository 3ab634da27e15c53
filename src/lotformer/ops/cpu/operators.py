"""Registration of the kernels with torch: shapes for tracing, gradients, and a short way for eager calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from operator import itemgetter
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
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def fresh_like(x: Tensor) -> Tensor:
    """`empty_like`, or contiguous where that has no whole rows: for tokens that overlap in memory."""
    y = torch.empty_like(x)
    return y if y.shape[3] == 1 or y.stride(3) == 1 else x.new_empty(x.shape)


def output_like(q: Tensor, v: Tensor) -> Tensor:
    """A tensor for a row of values per query, in the layout of the queries."""
    q = rows(q)
    batch, heads, n, dim = q.shape
    width = v.shape[3]
    if dim == width:
        return fresh_like(q)
    if q.stride(1) >= q.stride(2):
        return q.new_empty((batch, heads, n, width))
    return q.new_empty((batch, n, heads, width)).transpose(1, 2)


class Signature:
    """The schema of `lotformer::{name}`: it states the order of arguments and results, Python calls them by name."""

    def __init__(self, name: str) -> None:
        self.name, self.operator = f"lotformer::{name}", getattr(torch.ops.lotformer, name)
        self.direct = self.operator.default._op
        schema = self.operator.default._schema
        self.arguments = [argument.name for argument in schema.arguments]
        self.tensors = sum("Tensor" in str(argument.type) for argument in schema.arguments)
        self.returns = [result.name for result in schema.returns]

    def named(self, inputs: Iterable[Any]) -> dict[str, Any]:
        return dict(zip(self.arguments, inputs, strict=True))

    def ordered(self, given: dict[str, Any]) -> tuple[Any, ...]:
        """In the order of the arguments, None for what is not given."""
        return tuple(map(given.get, self.arguments))

    def by_name(self, call: Call) -> Call:
        """`call(*inputs)` with the inputs by name."""
        operator, pack, count = self.operator, itemgetter(*self.arguments), len(self.arguments)

        def named(**given: Any) -> Any:
            if torch.compiler.is_compiling() or len(given) != count:
                return operator(**given)  # which refuses other names
            return call(*pack(given))

        return named

    def register_fake(self, fake: Call) -> None:
        """The shapes of the results for tracing: `fake` takes the arguments by name."""
        torch.library.register_fake(self.name, lambda *inputs: fake(**self.named(inputs)))


# What `torch.library` registers for autograd serves tracing, but costs as much as a small call. Eager calls go past it.


def differentiable(signature: Signature, setup_context: Call, backward: Call) -> Call:
    """The operator with a derivative, called by name. Its first inputs are tensors or None."""
    direct, tensors = signature.direct, signature.tensors
    torch.library.register_autograd(signature.name, backward, setup_context=setup_context)

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                output = direct(*inputs)
            setup_context(ctx, inputs, output)  # torch would inspect a signature at every call to do this
            return output

    Eager.backward = staticmethod(backward)  # type: ignore[method-assign]

    def call(*inputs: Any) -> Any:
        if torch.is_grad_enabled():
            for x in inputs[:tensors]:
                if x is not None and x.requires_grad:
                    return Eager.apply(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return direct(*inputs)

    return signature.by_name(call)


def plain(signature: Signature) -> Call:
    """The operator for the backward of another: autograd hears of it only if a second derivative may be asked for."""
    operator, direct = signature.operator, signature.direct

    def call(*inputs: Any) -> Any:
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return operator(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return direct(*inputs)

    return call


def differentiable_once(name: str, *, advice: str, fakes: tuple[Call, Call] | None = None) -> Call:
    """`lotformer::{name}_forward`, called by name, with `lotformer::{name}_backward` for its derivative.

    Backward takes gradients of the first outputs, the last outputs, and all inputs, and returns gradients of the first
    inputs; how many is in the schemas.

    Args:
        advice: what to do who needs a second derivative.
        fakes: results of both for their arguments by name, if they are ever traced or two outputs have gradients.
    """
    if load_error is not None:
        return _missing
    operator, second = Signature(f"{name}_forward"), Signature(f"{name}_backward")
    derivative, tensors, outputs = plain(second), operator.tensors, operator.returns
    before = second.arguments[: -len(operator.arguments)]
    results = sum(argument not in outputs for argument in before)  # so many have gradients
    kept = len(outputs) - (len(before) - results)  # the first that backward takes

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
        ctx.options = inputs[tensors:]
        ctx.save_for_backward(*output[kept:], *inputs[:tensors])
        ctx.mark_non_differentiable(*output[results:])
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        nothing = (None,) * (tensors + len(ctx.options))
        grads = grads[:results]
        if all(grad is None for grad in grads):  # whatever came after the outputs did not depend on them
            return nothing
        saved = ctx.saved_tensors  # read once: with activation checkpointing a tensor can be unpacked only once
        inputs = saved[-tensors:]
        if fakes is not None and any(grad is None for grad in grads):
            empty = fakes[0](**operator.named((*inputs, *ctx.options)))
            grads = tuple(x.zero_() if grad is None else grad for x, grad in zip(empty, grads, strict=False))
        found = derivative(*(rows(grad) for grad in grads if grad is not None), *saved, *ctx.options)
        wanted = (None if x is None else g for x, g in zip(inputs, found, strict=False))
        return (*wanted, *nothing[len(found) :])

    def refuse(ctx: Any, *grads: Any) -> None:
        raise NotImplementedError(f"the CPU kernel has no second derivative. {advice}")

    if fakes is not None:
        operator.register_fake(fakes[0])
        second.register_fake(fakes[1])
    torch.library.register_autograd(second.name, refuse)
    return differentiable(operator, setup_context, backward)


def _missing(**given: Any) -> Any:
    raise RuntimeError(f"the CPU kernel is not built ({load_error}).")
