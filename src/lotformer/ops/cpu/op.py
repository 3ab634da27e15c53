"""The CPU kernel as a torch operator: loading, shapes for tracing, gradients, and when it can be used."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..problem import BALANCES, SOLVERS, Potentials, Result, Solve, Transport, is_traced
from .calls import differentiable, fresh_like, no_second_derivative, plain, rows, why_transformed

_load_error: str | None = None
try:
    from . import _kernel
except ImportError as error:
    _load_error = str(error)

MAX_WIDTH = 256
"""Largest rank and largest head dimension the kernel takes."""

STATE_NOTES = 4
"""Numbers at the end of a head's state that are about the solve, see `call.h`."""

_QUERY_FORM, _KEY_FORM, _KEY_ORIGIN, _RESIDUAL = range(-STATE_NOTES, 0)

_SOLVERS = {name: number for number, name in enumerate(SOLVERS)}
_BALANCES = {name: number for number, name in enumerate(BALANCES)}
_MISSED = 1e-4  # residual from which a solve is done again
_TIGHT = 1e-6  # what `tol=None`, "a fixed cost", is taken for: the kernel stops each head on its own anyway


def instruction_sets() -> list[str]:
    """The kernels this build can run on this machine, best first; `LOTFORMER_CPU_ISA` picks another one."""
    return [] if _load_error else _kernel.instruction_sets()


def sum_to_one(log_masses: Tensor) -> bool | None:
    """Whether the masses `(H, R)` of every head sum to one, to 2 %; None if the extension cannot tell."""
    x = log_masses
    if _load_error or x.dtype != torch.float32 or x.device.type != "cpu" or not x.is_contiguous():
        return None
    return _kernel.sum_to_one(x.data_ptr(), x.shape[0], x.shape[1])


def why_unavailable() -> str | None:
    if _load_error is None:
        return None
    return (
        f"the CPU kernel is not built ({_load_error}). Install a C++ compiler and reinstall the package with "
        "`pip install --no-build-isolation -e .`, or go on with the slower reference path."
    )


def takes(*tensors: Tensor | None) -> bool:
    """Whether the small operators beside the kernel can run on these tensors, here and now.

    Exported and traced programs should run where they are not, and a dispatch mode (a counter of products, for one)
    should see the operators it knows.
    """
    if _load_error or torch.compiler.is_exporting() or torch.jit.is_tracing() or why_transformed():
        return False
    if not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack():
        return False
    return all(x is None or (x.dtype == torch.float32 and x.device.type == "cpu") for x in tensors)


def why_unsupported(transport: Transport, solve: Solve) -> str | None:
    q = transport.q
    if q.device.type != "cpu":
        return f"it runs on the CPU and the tensors are on {q.device}."
    if q.dtype not in (torch.float32, torch.bfloat16):
        return f"it takes float32 and bfloat16, not {q.dtype}."
    _, _, _, _, rank, dim, value_dim = transport.shape
    if max(rank, dim, value_dim) > MAX_WIDTH or min(dim, value_dim) < 1:
        return f"it takes ranks and head dimensions from 1 to {MAX_WIDTH}, got {rank}, {dim} and {value_dim}."
    return why_transformed()


class _Tensors(NamedTuple):
    """The tensors of `cpu_forward` in its order: those with gradients first, as `cpu_backward` returns them."""

    q: Tensor
    k: Tensor
    v: Tensor
    pivots: Tensor | None
    log_masses: Tensor
    temperatures: Tensor | None  # (H,), or None: then the number in the options
    query_masses: Tensor | None  # (B, H, N)
    key_masses: Tensor | None  # (B, H, M)
    query_mask: Tensor | None
    key_mask: Tensor | None


class _Options(NamedTuple):
    """The other arguments of `cpu_forward`, which follow the tensors."""

    temperature: float
    solver: int
    iters: int
    tol: float
    balance: int

    @property
    def query_vectors(self) -> int:
        """Vectors in the state that are about the queries, see `call.h`."""
        if self.balance != _BALANCES["both"]:
            return int(self.balance == _BALANCES["keys"])
        return 2 if self.is_newton else self.iters

    @property
    def key_vectors(self) -> int:
        if self.balance == _BALANCES["none"]:
            return 1
        return 3 if self.is_newton else self.iters + 1

    @property
    def is_newton(self) -> bool:
        return self.solver == _SOLVERS["newton"]


_COUNT = len(_Tensors._fields)


def run(transport: Transport, solve: Solve) -> Result:
    t = transport
    heads = t.q.shape[1]
    temperature = solve.temperature(t.q.shape[3])
    per_head = None
    if isinstance(temperature, Tensor):
        per_head, temperature = temperature.float().expand(heads), 0.0
    tensors = _Tensors(
        q=rows(t.q),
        k=rows(t.k),
        v=rows(t.v),
        pivots=None if t.pivots is None else _floats(t.pivots),
        log_masses=_floats(t.log_masses),
        temperatures=per_head,
        query_masses=_per_head(t.query_masses, heads),
        key_masses=_per_head(t.key_masses, heads),
        query_mask=t.query_mask,
        key_mask=t.key_mask,
    )
    options = _Options(
        temperature=temperature,
        solver=_SOLVERS[solve.solver],
        iters=solve.iters,
        tol=_TIGHT if solve.tol is None else solve.tol,
        balance=_BALANCES[solve.balance],
    )
    out, state, _ = _forward(*tensors, *options)
    result = Result(
        out,
        residual=lambda: state.select(-1, _RESIDUAL),
        potentials=lambda: _potentials(state, transport, solve, options),
    )
    is_exact_for_keys_alone = options.is_newton and solve.balance == "keys"
    return _mended(result, t, solve) if is_exact_for_keys_alone and not is_traced(t.q) else result


def _mended(result: Result, t: Transport, solve: Solve) -> Result:
    """The result with samples that missed their column sums solved again, in fp64, by the reference.

    Where queries send hardly any mass to a pivot, and scores span hundreds, rounding in fp32 can stall the solve.
    """
    missed = (result.residual() > _MISSED).any(1)
    if not missed.any():
        return result
    index = missed.nonzero()[:, 0]
    own = {name: x[index] for name, x in t._asdict().items() if x is not None and name not in ("pivots", "log_masses")}
    if t.pivots is not None and t.pivots.dim() == 4:
        own["pivots"] = t.pivots[index]
    again = reference.run(t._replace(**own), solve)

    def potentials() -> Potentials:
        first, second = (
            x.double().index_copy(0, index, y.double())
            for x, y in zip(result.potentials(), again.potentials(), strict=True)
        )
        return first, second

    return Result(
        result.out.index_copy(0, index, again.out),
        residual=lambda: result.residual().index_copy(0, index, again.residual()),
        potentials=potentials,
    )


def _per_head(masses: Tensor | None, heads: int) -> Tensor | None:
    if masses is None:
        return None
    return (masses if masses.dim() == 3 else masses[:, None]).float().expand(-1, heads, -1)


def _floats(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float32 else x.float()  # to ask is quicker than a conversion to nothing else


def _state_size(options: _Options, rank: int) -> int:
    return (options.query_vectors + options.key_vectors) * rank + STATE_NOTES


def _potentials(state: Tensor, transport: Transport, solve: Solve, options: _Options) -> Potentials:
    """Of the last sweep, or of the exact solve, out of the state of `cpu_forward`; `call.h` says how it is laid out."""
    rank, keys = transport.rank, options.query_vectors

    def solved(first: int, form: int) -> Tensor:
        """Of a side whose vectors start at the first."""
        if options.is_newton:
            return vector(first).double() + vector(first + 1)
        return _potential(vector(first + options.iters - 1), state[..., form, None])

    def vector(index: int) -> Tensor:
        return state[..., index * rank : (index + 1) * rank]

    if solve.balance == "both":
        return solved(0, _QUERY_FORM), solved(keys, _KEY_FORM)
    prior = reference.log_pivot_masses(transport, solve)[:, 0].detach().expand(*state.shape[:2], -1)
    return prior, torch.zeros_like(prior) if solve.balance == "none" else solved(keys, _KEY_FORM)


def _potential(saved: Tensor, is_logarithm: Tensor) -> Tensor:
    """`g`, where the kernel keeps `exp g` unless that would leave the range of fp32. Zeros: nothing was solved."""
    return torch.where((is_logarithm == 0) & (saved > 0), saved.log(), saved)


def _fake_forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    tensors, options = _Tensors(*inputs[:_COUNT]), _Options(*inputs[_COUNT:])
    q, v = tensors.q, tensors.v
    batch, heads, n, dim = q.shape
    rank, value_dim = tensors.log_masses.shape[1], v.shape[3]
    if dim == value_dim:
        out = fresh_like(q)
    elif q.stride(1) >= q.stride(2):
        out = q.new_empty((batch, heads, n, value_dim))
    else:
        out = q.new_empty((batch, n, heads, value_dim)).transpose(1, 2)
    state = q.new_empty((batch, heads, _state_size(options, rank)), dtype=torch.float32)
    return out, state, q.new_empty((batch, heads, rank, value_dim), dtype=torch.float32)


def _fake_backward(grad: Tensor, state: Tensor, mixed: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    t = _Tensors(*inputs[:_COUNT])
    batch, heads, n, _ = t.q.shape
    lengths = (0 if t.query_masses is None else n, 0 if t.key_masses is None else t.k.shape[2])
    shapes = ((0,) if t.pivots is None else t.pivots.shape, t.log_masses.shape)
    small = (t.log_masses.new_empty(shape) for shape in shapes)
    per_head = t.q.new_empty((heads,), dtype=torch.float32)
    masses = (t.q.new_empty((batch, heads, length), dtype=torch.float32) for length in lengths)
    return (*(fresh_like(rows(x)) for x in (t.q, t.k, t.v)), *small, per_head, *masses)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.options = inputs[_COUNT:]
    ctx.save_for_backward(*output[1:], *inputs[:_COUNT])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, *unused: Any) -> tuple[Tensor | None, ...]:
    nothing = (None,) * (_COUNT + len(ctx.options))
    if grad is None:  # whatever came after the output did not depend on it
        return nothing
    state, mixed, *tensors = ctx.saved_tensors
    arguments = (rows(grad), state, mixed, *tensors, *ctx.options)
    grads = _cpu_backward(*arguments)
    wanted = (None if x is None else g for x, g in zip(tensors, grads, strict=False))
    return (*wanted, *nothing[len(grads) :])


if _load_error is None:
    torch.library.register_fake("lotformer::cpu_forward", _fake_forward)
    torch.library.register_fake("lotformer::cpu_backward", _fake_backward)
    _forward = differentiable("cpu_forward", _COUNT, _setup_context, _backward)
    _cpu_backward = plain("cpu_backward")
    no_second_derivative(
        "cpu_backward",
        'the CPU kernel has no second derivative. Use `backend="reference"`, which is differentiable any number of '
        "times for the Sinkhorn solver.",
    )
