# mypy: disable-error-code="no-untyped-def"
"""One program for each (sample, head), when all its scores fit on chip.

Sinkhorn runs forward in one launch, and back through all its sweeps in one launch per side; its scores stay in
registers meanwhile. The exact solver takes one launch per side. What is left, products with values and tokens, is the
work of `passes`.

Potentials are kept as `(B, H, slots, R)`. Sinkhorn: slot t is the potential before sweep t, the last slot the
potential after the last sweep. Newton: slot 0 is the solution, slot 1 what one sweep makes of it (for queries, the
solution again). The query plan is `softmax_j(s + g)` at the last slot; the key plan, of which column j is divided by
its sum, comes out of the last two slots.

Queries that are not solved have the potential `log m` in slot 0. One sweep makes `2 log m - log m'` of it, m' being what
they send to the pivots: slot 1, if the keys are solved for m'. Keys that are not solved have one slot, for the closing
half-step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..problem import LEAST_LOG_MASS
from .algebra import advance, first_guess, log_residual, polish, record
from .blocks import carry_values, look_over, mean_scores, mix, reduced_sum
from .tiles import (
    FREE,
    NEGATIVE,
    column_lse,
    log_masses,
    pivot_masses,
    real_rows,
    reverse_sweep,
    scores,
    sweep,
)

_NEVER = tl.constexpr(1e38)
_LEAST = tl.constexpr(LEAST_LOG_MASS["sinkhorn"])


@triton.jit
def _sinkhorn(
    x, x_n, log_a_ptr, valid, z, log_m, g, potentials, columns, column_ok, tokens, rank, depth, sweeps, uniform,
    KEYS: tl.constexpr, HAS_MASS: tl.constexpr, HAS_VALID: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sweeps of one side, from `g` on, or from the keys themselves: stores every potential, returns the newest."""
    ok = real_rows(valid, 0, tokens, HAS_VALID, BLOCK_T)
    log_a = log_masses(log_a_ptr, 0, tokens, uniform, HAS_MASS, BLOCK_T)
    s = scores(x, x_n, ok, z, columns, column_ok, depth, BLOCK_T, BLOCK_R, BLOCK_K, PRECISION)
    if KEYS:
        g = tl.where(column_ok, log_m - column_lse(s + log_a[:, None]), 0.0)
    tl.store(potentials + columns, g, column_ok)
    for t in range(1, sweeps + 1):
        g = sweep(s, log_a, log_m, g, column_ok)
        tl.store(potentials + t * rank + columns, g, column_ok)
    return g


@triton.jit
def _sent(log_m, swept, column_ok):
    """`log m'`, normalised, from what a sweep has made of `log m`."""
    sent = tl.where(column_ok, tl.maximum(2 * log_m - swept, _LEAST), NEGATIVE)
    top = tl.max(sent, 0)
    return tl.where(column_ok, sent - (top + tl.log(tl.sum(tl.exp(sent - top), 0))), 0.0)


@triton.jit(do_not_specialize=FREE)
def forward_kernel(
    q, k, v, z, log_m, query_log_a, key_log_a, query_valid, key_valid, out, query_g, key_g, u,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    query_a_b, query_a_h, key_a_b, key_a_h, query_valid_b, key_valid_b, key_valid_h, z_b, z_h, m_b,
    heads, n, m, rank, depth, width, iters, query_uniform, key_uniform,
    BALANCE: tl.constexpr,
    QUERY_MASS: tl.constexpr, KEY_MASS: tl.constexpr, QUERY_VALID: tl.constexpr, KEY_VALID: tl.constexpr,
    QUERY_TILE: tl.constexpr, KEY_TILE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sinkhorn: both plans and the output of one head."""
    head = tl.program_id(0).to(tl.int64)
    b, h = head // heads, head % heads
    columns = tl.arange(0, BLOCK_R)
    column_ok = columns < rank
    z += b * z_b + h * z_h
    log_pivots = pivot_masses(log_m, m_b, head, heads, rank, columns, column_ok)
    q += b * q_b + h * q_h
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    query_log_a += b * query_a_b + h * query_a_h
    query_valid += b * query_valid_b
    key_log_a += b * key_a_b + h * key_a_h
    key_valid += b * key_valid_b + h * key_valid_h
    u += head * rank * width
    start = tl.zeros([BLOCK_R], tl.float32)
    key_pivots = log_pivots
    if BALANCE == "keys":
        swept = _sinkhorn(
            q, q_n, query_log_a, query_valid, z, log_pivots, log_pivots, query_g + head * 2 * rank,
            columns, column_ok, n, rank, depth, 1, query_uniform,
            False, QUERY_MASS, QUERY_VALID, QUERY_TILE, BLOCK_R, BLOCK_K, PRECISION,
        )  # fmt: skip
        key_pivots = _sent(log_pivots, swept, column_ok)
    if BALANCE == "none":
        g = start
        closing = key_g + head * rank
        tl.store(query_g + head * rank + columns, log_pivots, column_ok)
    else:
        key_g += head * (iters + 1) * rank
        g = _sinkhorn(
            k, k_n, key_log_a, key_valid, z, key_pivots, start, key_g, columns, column_ok, m, rank, depth, iters - 1,
            key_uniform, True, KEY_MASS, KEY_VALID, KEY_TILE, BLOCK_R, BLOCK_K, PRECISION,
        )  # fmt: skip
        closing = key_g + iters * rank
    for first_d in range(0, width, BLOCK_D):
        top, total, carried = carry_values(
            k, k_n, v, v_n, key_log_a, key_valid, z, g, columns, column_ok, 0, m, m, depth, first_d, width, key_uniform,
            BALANCE == "none", KEY_MASS, KEY_VALID, BLOCK_N, BLOCK_R, BLOCK_K, BLOCK_D, PRECISION,
        )  # fmt: skip
        d = first_d + tl.arange(0, BLOCK_D)
        at = u + columns[:, None] * width + d[None, :]
        tl.store(at, carried / total[:, None], column_ok[:, None] & (d < width)[None, :])
        tl.store(closing + columns, key_pivots - (top + tl.log(total)), column_ok)
    g = log_pivots
    if BALANCE == "both":
        g = _sinkhorn(
            q, q_n, query_log_a, query_valid, z, log_pivots, start, query_g + head * (iters + 1) * rank,
            columns, column_ok, n, rank, depth, iters, query_uniform,
            False, QUERY_MASS, QUERY_VALID, QUERY_TILE, BLOCK_R, BLOCK_K, PRECISION,
        )  # fmt: skip
    tl.debug_barrier()  # `u` is read by other threads than wrote it
    mix(
        q, q_n, query_valid, z, g, u, out + head * n * width, columns, column_ok, 0, n, n, rank, depth, width,
        QUERY_VALID, BLOCK_N, BLOCK_R, BLOCK_K, PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=FREE)
def backward_sweeps_kernel(
    x, z, log_m, log_a_ptr, valid, potentials, y_partials, grad_potentials,
    x_b, x_h, x_n, a_b, a_h, valid_b, valid_h, z_b, z_h, m_b,
    heads, tokens, rank, depth, iters, chunks, uniform,
    KEYS: tl.constexpr, HAS_MASS: tl.constexpr, HAS_VALID: tl.constexpr,
    TILE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Back through all sweeps of one side, from the parts of the gradient of the newest potential."""
    head = tl.program_id(0).to(tl.int64)
    b, h = head // heads, head % heads
    columns = tl.arange(0, BLOCK_R)
    column_ok = columns < rank
    log_pivots = pivot_masses(log_m, m_b, head, heads, rank, columns, column_ok)
    x += b * x_b + h * x_h
    log_a_ptr += b * a_b + h * a_h
    valid += b * valid_b + h * valid_h
    potentials += head * (iters + 1) * rank + columns
    grad_potentials += head * (iters + 1) * rank + columns
    ok = real_rows(valid, 0, tokens, HAS_VALID, TILE)
    log_a = log_masses(log_a_ptr, 0, tokens, uniform, HAS_MASS, TILE)
    s = scores(x, x_n, ok, z + b * z_b + h * z_h, columns, column_ok, depth, TILE, BLOCK_R, BLOCK_K, PRECISION)
    y = reduced_sum(y_partials + head * chunks * rank, chunks, rank, columns, column_ok, BLOCK_R)
    newest = iters - 1 if KEYS else iters
    g_next = tl.load(potentials + newest * rank, column_ok, 0.0)
    tl.store(grad_potentials + newest * rank, y, column_ok)
    for back in range(1, iters):
        slot = newest - back
        g = tl.load(potentials + slot * rank, column_ok, 0.0)
        _, _, y = reverse_sweep(s, log_a, log_pivots, g, g_next, y)
        tl.store(grad_potentials + slot * rank, y, column_ok)
        g_next = g


@triton.jit(do_not_specialize=FREE)
def newton_kernel(
    x, z, log_m, log_a_ptr, valid, potentials,
    x_b, x_h, x_n, a_b, a_h, valid_b, valid_h, z_b, z_h, m_b,
    heads, tokens, rank, depth, uniform, tol, passes,
    HAS_MASS: tl.constexpr, HAS_VALID: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The exact potential of one side of a head, in both slots; stops by itself when it has reached `tol` ≥ 0."""
    head = tl.program_id(0).to(tl.int64)
    b, h = head // heads, head % heads
    columns = tl.arange(0, BLOCK_R)
    column_ok = columns < rank
    log_pivots = pivot_masses(log_m, m_b, head, heads, rank, columns, column_ok)
    z += b * z_b + h * z_h
    x += b * x_b + h * x_h
    log_a_ptr += b * a_b + h * a_h
    valid += b * valid_b + h * valid_h
    mean, spread = mean_scores(
        x, x_n, log_a_ptr, valid, z, columns, column_ok, 0, tokens, tokens, depth, uniform,
        HAS_MASS, HAS_VALID, BLOCK_N, BLOCK_R, BLOCK_K, PRECISION,
    )  # fmt: skip
    beta, g = first_guess(log_pivots, spread, mean, column_ok)
    best = g
    best_error = tl.full((), _NEVER, tl.float32)
    count = 0
    # one look more than there are steps: the last, at β = 1, is for polishing
    while count <= passes:
        edges, sums, drift = look_over(
            x, x_n, log_a_ptr, valid, z, g, beta, columns, column_ok, 0, tokens, tokens, depth, uniform,
            HAS_MASS, HAS_VALID, BLOCK_N, BLOCK_R, BLOCK_K, PRECISION,
        )  # fmt: skip
        if count < passes:
            error = tl.max(tl.abs(log_residual(sums, log_pivots, column_ok)), 0)
            best, best_error, stalled = record(beta, error, g, best, best_error)
            finished = (best_error < tol) | (stalled & (tol >= 0)) | (count == passes - 1)
            g, beta = advance(edges, sums, drift, log_pivots, g, beta, error, columns, column_ok, rank)
            g = tl.where(finished & (best_error < _NEVER), best, g)
            beta = tl.where(finished, 1.0, beta)
            count = tl.where(finished, passes, count + 1)
        else:
            g = polish(edges, sums, log_pivots, g, columns, column_ok, rank)
            count += 1
    potentials += head * 2 * rank + columns
    tl.store(potentials, g, column_ok)
    tl.store(potentials + rank, g, column_ok)
