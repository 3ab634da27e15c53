"""LOT attention as an operator of the CPU kernel: its arguments, its shapes, and when it can be used."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..problem import BALANCES, SOLVERS, Potentials, Result, Solve, Transport, is_traced
from .operators import (
    FLOAT_OR_BFLOAT16,
    MAX_WIDTH,
    differentiable_once,
    fresh_like,
    load_error,
    output_like,
    rows,
    why_not_here,
)

if load_error is None:
    from . import _kernel

STATE_NOTES = 4
"""Numbers at the end of a head's state that are about the solve, see `call.h`."""

_QUERY_FORM, _KEY_FORM, _KEY_ORIGIN, _RESIDUAL = range(-STATE_NOTES, 0)

_SOLVERS = {name: number for number, name in enumerate(SOLVERS)}
_BALANCES = {name: number for number, name in enumerate(BALANCES)}

MAX_PASSES = 120
"""Of the exact solve in the kernel. Longer walks are left to the reference in fp64: fp32 may reach their column sums,
but not their gradients."""

_WORTH_A_SECOND = 1e-4  # residual from which a solve that was to reach less is done again
_TIGHT = 1e-6  # what `tol=None`, "a fixed cost", is taken for: the kernel stops each head on its own anyway


def instruction_sets() -> list[str]:
    """The kernels this build can run on this machine, best first; `LOTFORMER_CPU_ISA` picks another one."""
    return [] if load_error else _kernel.instruction_sets()


def sum_to_one(log_masses: Tensor) -> bool | None:
    """True if the masses `(H, R)` of every head sum to one, to 2 %; None if the extension cannot tell."""
    x = log_masses
    if load_error or x.dtype != torch.float32 or x.device.type != "cpu" or not x.is_contiguous():
        return None
    return _kernel.sum_to_one(x.data_ptr(), x.shape[0], x.shape[1])


def why_unsupported(transport: Transport, solve: Solve) -> str | None:
    rank, dim, value_dim = transport.rank, transport.q.shape[3], transport.v.shape[3]
    if max(rank, dim, value_dim) > MAX_WIDTH or min(dim, value_dim) < 1:
        return f"it takes ranks and head dimensions from 1 to {MAX_WIDTH}, got {rank}, {dim} and {value_dim}."
    return why_not_here(FLOAT_OR_BFLOAT16, transport.q)


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
        query_masses=None if t.query_masses is None else _per_head(t.query_masses, heads),
        key_masses=None if t.key_masses is None else _per_head(t.key_masses, heads),
        query_mask=t.query_mask,
        key_mask=t.key_mask,
    )
    options = _Options(
        temperature=temperature,
        solver=_SOLVERS[solve.solver],
        iters=solve.iters,
        tol=_tolerance(solve),
        balance=_BALANCES[solve.balance],
    )
    out, state, _ = _forward(*tensors, *options)
    result = Result(
        out,
        residual=lambda: state.select(-1, _RESIDUAL),
        potentials=lambda: _potentials(state, transport, solve, options),
    )
    is_exact = options.is_newton and solve.balance != "none"
    return _mended(result, t, solve) if is_exact and not is_traced(t.q) else result


def _tolerance(solve: Solve) -> float:
    return _TIGHT if solve.tol is None else solve.tol


def _mended(result: Result, t: Transport, solve: Solve) -> Result:
    """The result with samples that missed their column sums solved again by the reference, in fp64, where that helps.

    Where a pivot gets hardly any mass, and scores span hundreds, rounding in fp32 can stall the solve.
    """
    first, bound = result.residual(), max(_WORTH_A_SECOND, _tolerance(solve))
    # a list, because for a few heads three operators take as long as a small call; what is not a number stays so
    missed = [b for b, heads in enumerate(first.tolist()) if any(x > bound for x in heads)]
    if not missed:
        return result
    index = torch.tensor(missed)
    own = {name: x[index] for name, x in t._asdict().items() if x is not None and name not in ("pivots", "log_masses")}
    if t.pivots is not None and t.pivots.dim() == 4:
        own["pivots"] = t.pivots[index]
    again = reference.run(t._replace(**own), solve)
    second = again.residual()
    better = second < first[index]

    def merged(x: Tensor, y: Tensor) -> Tensor:
        """x with what is better in y for some samples."""
        taken = better.view(*better.shape, *[1] * (x.dim() - 2))
        return x.index_copy(0, index, torch.where(taken, y, x[index]))

    def potentials() -> Potentials:
        (a, b), (c, d) = result.potentials(), again.potentials()
        return merged(a.double(), c.double()), merged(b.double(), d.double())

    return Result(merged(result.out, again.out), lambda: merged(first, second), potentials)


def _per_head(masses: Tensor, heads: int) -> Tensor:
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
    q = tensors.q
    batch, heads = q.shape[:2]
    rank, value_dim = tensors.log_masses.shape[1], tensors.v.shape[3]
    state = q.new_empty((batch, heads, _state_size(options, rank)), dtype=torch.float32)
    mixed = q.new_empty((batch, heads, rank, value_dim), dtype=torch.float32)
    return output_like(q, tensors.v), state, mixed


def _fake_backward(grad: Tensor, state: Tensor, mixed: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    t = _Tensors(*inputs[:_COUNT])
    batch, heads, n, _ = t.q.shape
    lengths = (0 if t.query_masses is None else n, 0 if t.key_masses is None else t.k.shape[2])
    shapes = ((0,) if t.pivots is None else t.pivots.shape, t.log_masses.shape)
    small = (t.log_masses.new_empty(shape) for shape in shapes)
    per_head = t.q.new_empty((heads,), dtype=torch.float32)
    masses = (t.q.new_empty((batch, heads, length), dtype=torch.float32) for length in lengths)
    return (*(fresh_like(rows(x)) for x in (t.q, t.k, t.v)), *small, per_head, *masses)


_forward = differentiable_once(
    "cpu",
    tensors=_COUNT,
    fakes=(_fake_forward, _fake_backward),
    advice='Use `backend="reference"`, which is differentiable any number of times for the Sinkhorn solver.',
)
