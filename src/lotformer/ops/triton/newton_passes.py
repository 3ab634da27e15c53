# mypy: disable-error-code="no-untyped-def"
"""Newton's passes over the tokens, for sequences whose scores do not fit on chip.

As in `passes`, a program owns a chunk of one head's tokens and leaves what it learned to the next launch: here the
Hessian, the column sums and their drift, of which one program per head makes a step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .algebra import advance, first_guess, implicit_solve, log_residual, polish, record
from .blocks import (
    look_over,
    mean_scores,
    reduced_sum,
)
from .tiles import FREE, pivot_masses

_NEVER = tl.constexpr(1e38)


@triton.jit(do_not_specialize=FREE)
def newton_start_kernel(
    x, z, log_a_ptr, valid, partials,
    x_b, x_h, x_n, a_b, a_h, valid_b, valid_h, z_b, z_h,
    heads, tokens, rank, depth, chunk, chunks, uniform,
    HAS_MASS: tl.constexpr, HAS_VALID: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A chunk's part of the mean scores (R numbers) and of their mean range (one more)."""
    head = tl.program_id(0).to(tl.int64)
    chunk_id = tl.program_id(1)
    b, h = head // heads, head % heads
    columns = tl.arange(0, BLOCK_R)
    column_ok = columns < rank
    z += b * z_b + h * z_h
    x += b * x_b + h * x_h
    log_a_ptr += b * a_b + h * a_h
    valid += b * valid_b + h * valid_h
    first = chunk_id * chunk
    last = tl.minimum(first + chunk, tokens)
    mean, spread = mean_scores(
        x, x_n, log_a_ptr, valid, z, columns, column_ok, first, last, tokens, depth, uniform,
        HAS_MASS, HAS_VALID, BLOCK_N, BLOCK_R, BLOCK_K, PRECISION,
    )  # fmt: skip
    partials += (head * chunks + chunk_id) * (rank + 1)
    tl.store(partials + columns, mean, column_ok)
    tl.store(partials + rank, spread)


@triton.jit(do_not_specialize=FREE)
def newton_begin_kernel(partials, log_m, state, m_b, heads, rank, chunks, BLOCK_R: tl.constexpr):
    """The state of a head at the start of the path.

    `(R: potential, R: best potential, β, error of the best, finished)`
    """
    head = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_R)
    column_ok = columns < rank
    log_pivots = pivot_masses(log_m, m_b, head, heads, rank, columns, column_ok)
    partials += head * chunks * (rank + 1)
    mean = tl.zeros([BLOCK_R], tl.float32)
    spread = tl.full((), 0.0, tl.float32)
    for c in range(chunks):
        mean += tl.load(partials + c * (rank + 1) + columns, column_ok, 0.0)
        spread += tl.load(partials + c * (rank + 1) + rank)
    beta, g = first_guess(log_pivots, spread, mean, column_ok)
    state += head * (2 * rank + 3)
    tl.store(state + columns, g, column_ok)
    tl.store(state + rank + columns, g, column_ok)
    tl.store(state + 2 * rank, beta)
    tl.store(state + 2 * rank + 1, _NEVER)
    tl.store(state + 2 * rank + 2, 0.0)


@triton.jit(do_not_specialize=FREE)
def newton_look_kernel(
    x, z, log_a_ptr, valid, state, partials,
    x_b, x_h, x_n, a_b, a_h, valid_b, valid_h, z_b, z_h,
    heads, tokens, rank, depth, state_size, chunk, chunks, uniform,
    ON_PATH: tl.constexpr, HAS_MASS: tl.constexpr, HAS_VALID: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A chunk's part of `PᵀAP`, `b` and `∂b/∂β`, `(R² , R, R)` numbers; at β = 1 unless `ON_PATH`."""
    head = tl.program_id(0).to(tl.int64)
    chunk_id = tl.program_id(1)
    state += head * state_size
    beta = 1.0
    finished = 0.0
    if ON_PATH:
        beta = tl.load(state + 2 * rank)
        finished = tl.load(state + 2 * rank + 2)
    if finished == 0.0:
        b, h = head // heads, head % heads
        columns = tl.arange(0, BLOCK_R)
        column_ok = columns < rank
        z += b * z_b + h * z_h
        x += b * x_b + h * x_h
        log_a_ptr += b * a_b + h * a_h
        valid += b * valid_b + h * valid_h
        g = tl.load(state + columns, column_ok, 0.0)
        first = chunk_id * chunk
        last = tl.minimum(first + chunk, tokens)
        edges, sums, drift = look_over(
            x, x_n, log_a_ptr, valid, z, g, beta, columns, column_ok, first, last, tokens, depth, uniform,
            HAS_MASS, HAS_VALID, BLOCK_N, BLOCK_R, BLOCK_K, PRECISION,
        )  # fmt: skip
        partials += (head * chunks + chunk_id) * rank * (rank + 2)
        both = column_ok[:, None] & column_ok[None, :]
        tl.store(partials + columns[:, None] * rank + columns[None, :], edges, both)
        tl.store(partials + rank * rank + columns, sums, column_ok)
        tl.store(partials + rank * (rank + 1) + columns, drift, column_ok)


@triton.jit
def _looked(partials, chunks, rank, columns, column_ok, BLOCK_R: tl.constexpr):
    """`PᵀAP`, `b` and `∂b/∂β` summed over the chunks."""
    both = column_ok[:, None] & column_ok[None, :]
    edges = tl.zeros([BLOCK_R, BLOCK_R], tl.float32)
    sums = tl.zeros([BLOCK_R], tl.float32)
    drift = tl.zeros([BLOCK_R], tl.float32)
    for c in range(chunks):
        part = partials + c * rank * (rank + 2)
        edges += tl.load(part + columns[:, None] * rank + columns[None, :], both, 0.0)
        sums += tl.load(part + rank * rank + columns, column_ok, 0.0)
        drift += tl.load(part + rank * (rank + 1) + columns, column_ok, 0.0)
    return edges, sums, drift


@triton.jit(do_not_specialize=FREE)
def newton_step_kernel(
    partials, log_m, state, m_b, heads, rank, chunks, tol, last, BLOCK_R: tl.constexpr
):  # fmt: skip
    """One step along the path. A head that has finished, or has no step left, holds its best potential."""
    head = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_R)
    column_ok = columns < rank
    state += head * (2 * rank + 3)
    finished = tl.load(state + 2 * rank + 2)
    if finished == 0.0:
        log_pivots = pivot_masses(log_m, m_b, head, heads, rank, columns, column_ok)
        g = tl.load(state + columns, column_ok, 0.0)
        best = tl.load(state + rank + columns, column_ok, 0.0)
        beta = tl.load(state + 2 * rank)
        best_error = tl.load(state + 2 * rank + 1)
        edges, b, drift = _looked(
            partials + head * chunks * rank * (rank + 2), chunks, rank, columns, column_ok, BLOCK_R
        )  # fmt: skip
        error = tl.max(tl.abs(log_residual(b, log_pivots, column_ok)), 0)
        best, best_error, stalled = record(beta, error, g, best, best_error)
        done = (best_error < tol) | (stalled & (tol >= 0))
        g, beta = advance(edges, b, drift, log_pivots, g, beta, error, columns, column_ok, rank)
        g = tl.where((done | (last != 0)) & (best_error < _NEVER), best, g)
        tl.store(state + columns, g, column_ok)
        tl.store(state + rank + columns, best, column_ok)
        tl.store(state + 2 * rank, beta)
        tl.store(state + 2 * rank + 1, best_error)
        tl.store(state + 2 * rank + 2, tl.where(done, 1.0, 0.0))


@triton.jit(do_not_specialize=FREE)
def newton_finish_kernel(
    partials, log_m, state, potentials, m_b, heads, rank, chunks, BLOCK_R: tl.constexpr
):  # fmt: skip
    """A last Newton step at β = 1; the result goes to both slots."""
    head = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_R)
    column_ok = columns < rank
    log_pivots = pivot_masses(log_m, m_b, head, heads, rank, columns, column_ok)
    g = tl.load(state + head * (2 * rank + 3) + columns, column_ok, 0.0)
    edges, b, _ = _looked(partials + head * chunks * rank * (rank + 2), chunks, rank, columns, column_ok, BLOCK_R)
    g = polish(edges, b, log_pivots, g, columns, column_ok, rank)
    tl.store(potentials + head * 2 * rank + columns, g, column_ok)
    tl.store(potentials + (head * 2 + 1) * rank + columns, g, column_ok)


@triton.jit(do_not_specialize=FREE)
def implicit_kernel(
    partials, y_partials, grad_potentials, rank, chunks, BLOCK_R: tl.constexpr
):  # fmt: skip
    """The implicit gradient: `H y = ` the gradient of the potential, kept in slot 0."""
    head = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_R)
    column_ok = columns < rank
    side = reduced_sum(y_partials + head * chunks * rank, chunks, rank, columns, column_ok, BLOCK_R)
    edges, b, _ = _looked(partials + head * chunks * rank * (rank + 2), chunks, rank, columns, column_ok, BLOCK_R)
    y = implicit_solve(edges, b, side, columns, column_ok, rank)
    tl.store(grad_potentials + head * 2 * rank + columns, y, column_ok)
