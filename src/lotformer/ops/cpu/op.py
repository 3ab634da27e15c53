"""The CPU kernel as a torch operator: loading, shapes for tracing, gradients, and when it can be used."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..problem import Problem, check_pivot_masses

_load_error: str | None = None
try:
    from ._kernel import instruction_sets as _runnable
except ImportError as error:
    _load_error = str(error)

MAX_WIDTH = 256
"""Largest rank and largest head dimension the kernel takes."""

_SOLVERS = {"sinkhorn": 0, "newton": 1}
_TIGHT = 1e-6  # what `tol=None`, "a fixed cost", is taken for: the kernel stops each head on its own anyway


def instruction_sets() -> list[str]:
    """The kernels this build can run on this machine, best first; `LOTFORMER_CPU_ISA` picks another one."""
    return [] if _load_error else _runnable()


def why_unavailable() -> str | None:
    if _load_error is None:
        return None
    return (
        f"the CPU kernel is not built ({_load_error}). Install a C++ compiler and reinstall the package with "
        "`pip install --no-build-isolation -e .`, or go on with the slower reference path."
    )


def why_unsupported(problem: Problem) -> str | None:
    p = problem
    if p.q.device.type != "cpu":
        return f"it runs on the CPU and the tensors are on {p.q.device}."
    if p.q.dtype not in (torch.float32, torch.bfloat16):
        return f"it takes float32 and bfloat16, not {p.q.dtype}."
    _, _, _, _, rank, dim, value_dim = p.shape
    if max(rank, dim, value_dim) > MAX_WIDTH or min(dim, value_dim) < 1:
        return f"it takes ranks and head dimensions from 1 to {MAX_WIDTH}, got {rank}, {dim} and {value_dim}."
    if not torch.compiler.is_compiling() and torch._C._functorch.maybe_current_level() is not None:
        return "it has no rules for torch.func transforms."
    if torch.autograd.forward_ad._current_level >= 0:
        return "it has no forward-mode derivative."
    return None


def run(problem: Problem) -> Tensor:
    p = problem
    heads = p.q.shape[1]
    temperatures = None
    temperature = 0.0
    if isinstance(p.eps, Tensor):
        temperatures = (p.scale / p.eps.float()).expand(heads)
    else:
        temperature = p.scale / p.eps
    refusal: RuntimeError | None = None
    try:
        out, _, _ = _forward(
            _rows(p.q),
            _rows(p.k),
            _rows(p.v),
            p.pivots.float(),
            p.log_masses.float(),
            temperatures,
            _per_head(p.query_masses, heads),
            _per_head(p.key_masses, heads),
            p.query_mask,
            p.key_mask,
            temperature,
            _SOLVERS[p.solver],
            p.iters,
            _TIGHT if p.tol is None else p.tol,
        )
        return out
    except RuntimeError as error:
        refusal = error
    check_pivot_masses(p)  # what the kernel refuses, in better words
    raise refusal


# What `torch.library` registers for autograd serves tracing, but costs as much as a small call. Eager calls go past it.


def _forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    if torch.compiler.is_compiling():
        return torch.ops.lotformer.cpu_forward(*inputs)
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        return _Eager.apply(*inputs)
    return _bare_forward(*inputs)


def _bare_forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.lotformer.cpu_forward.default(*inputs)


def _per_head(masses: Tensor | None, heads: int) -> Tensor | None:
    if masses is None:
        return None
    return (masses if masses.dim() == 3 else masses[:, None]).float().expand(-1, heads, -1)


def _rows(x: Tensor) -> Tensor:
    """The kernel reads any layout whose last dimension is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _state_size(solver: int, iters: int, rank: int) -> int:
    return (2 * iters + 1 if solver == _SOLVERS["sinkhorn"] else 3) * rank + 4


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, pivots: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, n, dim = q.shape
    rank, value_dim = pivots.shape[-2], v.shape[3]
    *_, solver, iters, _ = rest
    out = _fresh_like(q) if dim == value_dim else q.new_empty((batch, heads, n, value_dim))
    state = q.new_empty((batch, heads, _state_size(solver, iters, rank)), dtype=torch.float32)
    return out, state, q.new_empty((batch, heads, rank, value_dim), dtype=torch.float32)


def _fake_backward(
    grad: Tensor, state: Tensor, mixed: Tensor, q: Tensor, k: Tensor, v: Tensor, pivots: Tensor,
    log_masses: Tensor, temperatures: Tensor | None, query_masses: Tensor | None, key_masses: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    batch, heads, n, _ = q.shape
    lengths = (0 if query_masses is None else n, 0 if key_masses is None else k.shape[2])
    small = (x.new_empty(x.shape, dtype=torch.float32) for x in (pivots, log_masses))
    per_head = q.new_empty((heads,), dtype=torch.float32)
    masses = (q.new_empty((batch, heads, length), dtype=torch.float32) for length in lengths)
    return (*(_fresh_like(_rows(x)) for x in (q, k, v)), *small, per_head, *masses)


def _fresh_like(x: Tensor) -> Tensor:
    """`empty_like`, or contiguous where that has no whole rows: for tokens that overlap in memory."""
    y = torch.empty_like(x)
    return y if y.shape[3] == 1 or y.stride(3) == 1 else x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, ctx.options = inputs[:10], inputs[10:]
    ctx.save_for_backward(*output[1:], *tensors)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, *unused: Any) -> tuple[Tensor | None, ...]:
    if grad is None:  # whatever came after the output did not depend on it
        return (None,) * 14
    state, mixed, q, k, v, pivots, log_masses, temperatures, query_masses, key_masses, query_mask, key_mask = (
        ctx.saved_tensors
    )
    arguments = (
        _rows(grad), state, mixed, q, k, v, pivots, log_masses, temperatures, query_masses, key_masses,
        query_mask, key_mask, *ctx.options,
    )  # fmt: skip
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        grads = torch.ops.lotformer.cpu_backward(*arguments)
    else:
        with torch._C._AutoDispatchBelowAutograd():
            grads = torch.ops.lotformer.cpu_backward.default(*arguments)
    wanted = (q, k, v, pivots, log_masses, temperatures, query_masses, key_masses)
    masks_and_options = (None,) * 6
    return (*(None if x is None else g for x, g in zip(wanted, grads, strict=True)), *masks_and_options)


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        output = _bare_forward(*inputs)
        _setup_context(ctx, inputs, output)  # torch would inspect a signature at every call to do this
        return output

    backward = staticmethod(_backward)


def _no_second_derivative(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError(
        'the CPU kernel has no second derivative. Use `backend="reference"`, which is differentiable any number of '
        "times for the Sinkhorn solver."
    )


if _load_error is None:
    torch.library.register_fake("lotformer::cpu_forward", _fake_forward)
    torch.library.register_fake("lotformer::cpu_backward", _fake_backward)
    torch.library.register_autograd("lotformer::cpu_forward", _backward, setup_context=_setup_context)
    torch.library.register_autograd("lotformer::cpu_backward", _no_second_derivative)
