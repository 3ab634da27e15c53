"""LOT attention as an operator of the CPU kernel: its arguments, its shapes, and when it can be used."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..problem import SOLVERS, Potentials, Result, Solve, Transport, is_traced
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


_BALANCES = ("both", "keys", "none")
"""In the order of `call.h`."""


def why_unsupported(transport: Transport, solve: Solve) -> str | None:
    rank, dim, value_dim = transport.rank, transport.q.shape[3], transport.v.shape[3]
    if max(rank, dim, value_dim) > MAX_WIDTH or min(dim, value_dim) < 1:
        return f"it takes ranks and head dimensions from 1 to {MAX_WIDTH}, got {rank}, {dim} and {value_dim}."
    if solve.balance not in _BALANCES:
        return f"the kernel does not know balance={solve.balance!r}."
    return why_not_here(FLOAT_OR_BFLOAT16, transport.q)


def _vectors(solver: str, iters: int, balance: str) -> tuple[int, int]:
    """The number of vectors in the state that are about the queries, and about the keys, see `call.h`."""
    queries, keys = (2, 3) if solver == "newton" else (iters, iters + 1)
    return {"both": (queries, keys), "keys": (1, keys), "none": (0, 1)}[balance]


def run(transport: Transport, solve: Solve) -> Result:
    t = transport
    heads = t.q.shape[1]
    temperature = solve.temperature(t.q.shape[3])
    per_head = None
    if isinstance(temperature, Tensor):
        per_head, temperature = temperature.float().expand(heads), 0.0
    out, state, _ = _forward(
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
        temperature=temperature,
        solver=SOLVERS.index(solve.solver),
        iters=solve.iters,
        tol=_tolerance(solve),
        balance=_BALANCES.index(solve.balance),
    )
    result = Result(
        out,
        residual=lambda: state.select(-1, _RESIDUAL),
        potentials=lambda: _potentials(state, transport, solve),
    )
    is_exact = solve.solver == "newton" and solve.balance != "none"
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


def _potentials(state: Tensor, transport: Transport, solve: Solve) -> Potentials:
    """Of the last sweep, or of the exact solve, out of the state of `cpu_forward`; `call.h` says how it is laid out."""
    rank, (keys, _) = transport.rank, _vectors(solve.solver, solve.iters, solve.balance)

    def solved(first: int, form: int) -> Tensor:
        """Of a side whose vectors start at the first."""
        if solve.solver == "newton":
            return vector(first).double() + vector(first + 1)
        return _potential(vector(first + solve.iters - 1), state[..., form, None])

    def vector(index: int) -> Tensor:
        return state[..., index * rank : (index + 1) * rank]

    if solve.balance == "both":
        return solved(0, _QUERY_FORM), solved(keys, _KEY_FORM)
    prior = reference.log_pivot_masses(transport, solve)[:, 0].detach().expand(*state.shape[:2], -1)
    return prior, torch.zeros_like(prior) if solve.balance == "none" else solved(keys, _KEY_FORM)


def _potential(saved: Tensor, is_logarithm: Tensor) -> Tensor:
    """`g`, where the kernel keeps `exp g` unless that would leave the range of fp32. Zeros: nothing was solved."""
    return torch.where((is_logarithm == 0) & (saved > 0), saved.log(), saved)


def _fake_forward(
    q: Tensor, v: Tensor, log_masses: Tensor, solver: int, iters: int, balance: int, **rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads = q.shape[:2]
    rank, value_dim = log_masses.shape[1], v.shape[3]
    size = sum(_vectors(SOLVERS[solver], iters, _BALANCES[balance])) * rank + STATE_NOTES
    state = q.new_empty((batch, heads, size), dtype=torch.float32)
    mixed = q.new_empty((batch, heads, rank, value_dim), dtype=torch.float32)
    return output_like(q, v), state, mixed


def _fake_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pivots: Tensor | None,
    log_masses: Tensor,
    query_masses: Tensor | None,
    key_masses: Tensor | None,
    **rest: Any,
) -> tuple[Tensor, ...]:
    batch, heads, n, _ = q.shape
    lengths = (0 if query_masses is None else n, 0 if key_masses is None else k.shape[2])
    masses = ((batch, heads, length) for length in lengths)
    shapes = ((0,) if pivots is None else pivots.shape, log_masses.shape, (heads,), *masses)
    small = (q.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return (*(fresh_like(rows(x)) for x in (q, k, v)), *small)


_forward = differentiable_once(
    "cpu",
    fakes=(_fake_forward, _fake_backward),
    advice='Use `backend="reference"`, which is differentiable any number of times for the Sinkhorn solver.',
)
