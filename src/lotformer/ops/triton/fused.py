# mypy: disable-error-code="no-untyped-def"
"""One program for each (sample, head), when all its scores fit on chip.

Sinkhorn's sweeps, forward and backward, run on scores held in registers; the exact solver and the products with
values and tokens walk over blocks (see `blocks`), whose tokens then come from the cache.

Potentials are kept as `(B, H, slots, R)`. Sinkhorn: slot t is the potential before sweep t, the last slot the
potential after the last sweep. Newton: slot 0 is the solution, slot 1 what one sweep makes of it (for queries, the
solution again). The query plan is `softmax_j(s + g)` at the last slot; the key plan, of which column j is divided by
its sum, comes out of the last two slots.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .algebra import advance, first_guess, implicit_solve, log_residual, polish, record
from .blocks import carry_values, look_over, mean_scores, mix, pull_output, pull_tokens, pull_values, row_products
from .tiles import column_lse, log_masses, real_rows, reverse_sweep, scores, sweep

_NEVER = tl.constexpr(1e38)


@triton.jit
def _sinkhorn(
    x, x_n, log_a_ptr, valid, z, log_m, potentials, columns, column_ok, tokens, rank, depth, iters, uniform,
    KEYS: tl.constexpr, HAS_MASS: tl.constexpr, HAS_VALID: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sweeps of one side: stores every potential (but the keys' last), returns the newest."""
    ok = real_rows(valid, 0, tokens, HAS_VALID, BLOCK_T)
    log_a = log_masses(log_a_ptr, 0, tokens, uniform, HAS_MASS, BLOCK_T)
    s = scores(x, x_n, ok, z, columns, column_ok, depth, BLOCK_T, BLOCK_R, BLOCK_K, PRECISION)
    g = tl.zeros([BLOCK_R], tl.float32)
    if KEYS:
        g = tl.where(column_ok, log_m - column_lse(s + log_a[:, None]), 0.0)
    tl.store(potentials + columns, g, column_ok)
    for t in range(1, iters if KEYS else iters + 1):
        g = sweep(s, log_a, log_m, g, column_ok)
        tl.store(potentials + t * rank + columns, g, column_ok)
    return g


@triton.jit
def _newton(
    x, x_n, log_a, valid, z, log_m, potentials, columns, column_ok, tokens, rank, depth, tol, passes, uniform,
    HAS_MASS: tl.constexpr, HAS_VALID: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The exact potential of one side, in both slots; a head stops by itself when it has reached `tol` ≥ 0."""
    mean, spread = mean_scores(
        x, x_n, log_a, valid, z, columns, column_ok, 0, tokens, tokens, depth, uniform,
        HAS_MASS, HAS_VALID, BLOCK_N, BLOCK_R, BLOCK_K, PRECISION,
    )  # fmt: skip
    beta, g = first_guess(log_m, spread, mean, column_ok)
    best = g
    best_error = tl.full((), _NEVER, tl.float32)
    count = 0
    # one look more than there are steps: the last, at β = 1, is for polishing
    while count <= passes:
        edges, b, drift = look_over(
            x, x_n, log_a, valid, z, g, beta, columns, column_ok, 0, tokens, tokens, depth, uniform,
            HAS_MASS, HAS_VALID, BLOCK_N, BLOCK_R, BLOCK_K, PRECISION,
        )  # fmt: skip
        if count < passes:
            error = tl.max(tl.abs(log_residual(b, log_m, column_ok)), 0)
            best, best_error, stalled = record(beta, error, g, best, best_error)
            finished = (best_error < tol) | (stalled & (tol >= 0)) | (count == passes - 1)
            g, beta = advance(edges, b, drift, log_m, g, beta, error, columns, column_ok, rank)
            g = tl.where(finished & (best_error < _NEVER), best, g)
            beta = tl.where(finished, 1.0, beta)
            count = tl.where(finished, passes, count + 1)
        else:
            g = polish(edges, b, log_m, g, columns, column_ok, rank)
            count += 1
    tl.store(potentials + columns, g, column_ok)
    tl.store(potentials + rank + columns, g, column_ok)
    return g


@triton.jit
def forward_kernel(
    q, k, v, z, log_m, query_log_a, key_log_a, query_valid, key_valid, out, query_g, key_g, u,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    query_a_b, query_a_h, key_a_b, key_a_h, query_valid_b, key_valid_b, key_valid_h,
    heads, n, m, rank, depth, width, iters, slots, query_uniform, key_uniform, tol, passes,
    NEWTON: tl.constexpr, QUERY_MASS: tl.constexpr, KEY_MASS: tl.constexpr,
    QUERY_VALID: tl.constexpr, KEY_VALID: tl.constexpr,
    QUERY_TILE: tl.constexpr, KEY_TILE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Both plans and the output of one head."""
    head = tl.program_id(0).to(tl.int64)
    b, h = head // heads, head % heads
    columns = tl.arange(0, BLOCK_R)
    column_ok = columns < rank
    z += h * rank * depth
    log_pivots = tl.load(log_m + h * rank + columns, column_ok, 0.0)
    q += b * q_b + h * q_h
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    query_log_a += b * query_a_b + h * query_a_h
    key_log_a += b * key_a_b + h * key_a_h
    query_valid += b * query_valid_b
    key_valid += b * key_valid_b + h * key_valid_h
    query_g += head * slots * rank
    key_g += head * slots * rank
    u += head * rank * width
    if NEWTON:
        g = _newton(
            k, k_n, key_log_a, key_valid, z, log_pivots, key_g, columns, column_ok, m, rank, depth, tol, passes,
            key_uniform, KEY_MASS, KEY_VALID, BLOCK_N, BLOCK_R, BLOCK_K, PRECISION,
        )  # fmt: skip
    else:
        g = _sinkhorn(
            k, k_n, key_log_a, key_valid, z, log_pivots, key_g, columns, column_ok, m, rank, depth, iters,
            key_uniform, True, KEY_MASS, KEY_VALID, KEY_TILE, BLOCK_R, BLOCK_K, PRECISION,
        )  # fmt: skip
    for first_d in range(0, width, BLOCK_D):
        top, total, carried = carry_values(
            k, k_n, v, v_n, key_log_a, key_valid, z, g, columns, column_ok, 0, m, m, depth, first_d, width, key_uniform,
            KEY_MASS, KEY_VALID, BLOCK_N, BLOCK_R, BLOCK_K, BLOCK_D, PRECISION,
        )  # fmt: skip
        d = first_d + tl.arange(0, BLOCK_D)
        at = u + columns[:, None] * width + d[None, :]
        tl.store(at, carried / total[:, None], column_ok[:, None] & (d < width)[None, :])
        tl.store(key_g + (slots - 1) * rank + columns, log_pivots - (top + tl.log(total)), column_ok)
    if NEWTON:
        g = _newton(
            q, q_n, query_log_a, query_valid, z, log_pivots, query_g, columns, column_ok, n, rank, depth, tol, passes,
            query_uniform, QUERY_MASS, QUERY_VALID, BLOCK_N, BLOCK_R, BLOCK_K, PRECISION,
        )  # fmt: skip
    else:
        g = _sinkhorn(
            q, q_n, query_log_a, query_valid, z, log_pivots, query_g, columns, column_ok, n, rank, depth, iters,
            query_uniform, False, QUERY_MASS, QUERY_VALID, QUERY_TILE, BLOCK_R, BLOCK_K, PRECISION,
        )  # fmt: skip
    tl.debug_barrier()  # `u` is read by other threads than wrote it
    mix(
        q, q_n, query_valid, z, g, u, out + head * n * width, columns, column_ok, 0, n, n, depth, width,
        QUERY_VALID, BLOCK_N, BLOCK_R, BLOCK_K, PRECISION,
    )  # fmt: skip


@triton.jit
def _pull_sweeps(
    x, x_n, log_a_ptr, valid, z, log_m, potentials, grad_potentials, y, newest, columns, column_ok, tokens, rank,
    depth, uniform, count, HAS_MASS: tl.constexpr, HAS_VALID: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Back through `count` sweeps from the gradient `y` of slot `newest`; stores each, returns the oldest."""
    ok = real_rows(valid, 0, tokens, HAS_VALID, BLOCK_T)
    log_a = log_masses(log_a_ptr, 0, tokens, uniform, HAS_MASS, BLOCK_T)
    s = scores(x, x_n, ok, z, columns, column_ok, depth, BLOCK_T, BLOCK_R, BLOCK_K, PRECISION)
    g_next = tl.load(potentials + newest * rank + columns, column_ok, 0.0)
    tl.store(grad_potentials + newest * rank + columns, y, column_ok)
    for back in range(1, count + 1):
        slot = newest - back
        g = tl.load(potentials + slot * rank + columns, column_ok, 0.0)
        _, _, y = reverse_sweep(s, log_a, log_m, g, g_next, y)
        tl.store(grad_potentials + slot * rank + columns, y, column_ok)
        g_next = g
    return y


@triton.jit
def backward_kernel(
    x, v, z, log_m, log_a, valid, potentials, u, grad_u, grad_out,
    grad_x, grad_v, grad_z, grad_log_a, grad_potentials,
    x_b, x_h, x_n, v_b, v_h, v_n, a_b, a_h, valid_b, valid_h, out_b, out_h, out_n,
    heads, tokens, rank, depth, width, iters, slots, uniform,
    KEYS: tl.constexpr, NEWTON: tl.constexpr, HAS_MASS: tl.constexpr, HAS_VALID: tl.constexpr,
    MASS_GRADIENT: tl.constexpr,
    TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One side of a head.

    Queries: from the gradient of the output to those of the queries and of `u = Wᵀ v`. Keys: from the latter to those
    of keys and values. Both: to those of the pivots through this side.
    """
    head = tl.program_id(0).to(tl.int64)
    b, h = head // heads, head % heads
    columns = tl.arange(0, BLOCK_R)
    column_ok = columns < rank
    z += h * rank * depth
    log_pivots = tl.load(log_m + h * rank + columns, column_ok, 0.0)
    x += b * x_b + h * x_h
    v += b * v_b + h * v_h
    log_a += b * a_b + h * a_h
    valid += b * valid_b + h * valid_h
    grad_out += b * out_b + h * out_h
    potentials += head * slots * rank
    grad_potentials += head * slots * rank
    u += head * rank * width
    grad_u += head * rank * width
    newest = slots - 2 if KEYS else slots - 1
    g = tl.load(potentials + newest * rank + columns, column_ok, 0.0)
    if KEYS:
        g_next = tl.load(potentials + (newest + 1) * rank + columns, column_ok, 0.0)
        carried = row_products(u, grad_u, columns, column_ok, width, BLOCK_R, BLOCK_K)
        y = pull_values(
            x, x_n, v, v_n, log_a, valid, z, g, g_next - log_pivots, carried, grad_u, columns, column_ok, 0, tokens,
            tokens, depth, width, uniform, HAS_MASS, HAS_VALID, BLOCK_N, BLOCK_R, BLOCK_K, PRECISION,
        )  # fmt: skip
    else:
        y = tl.zeros([BLOCK_R], tl.float32)
        for first_d in range(0, width, BLOCK_D):
            y, carried = pull_output(
                x, x_n, valid, z, g, u, grad_out, out_n, columns, column_ok, 0, tokens, tokens, depth, first_d, width,
                HAS_VALID, BLOCK_N, BLOCK_R, BLOCK_K, BLOCK_D, PRECISION,
            )  # fmt: skip
            d = first_d + tl.arange(0, BLOCK_D)
            at = grad_u + columns[:, None] * width + d[None, :]
            tl.store(at, carried, column_ok[:, None] & (d < width)[None, :])
    if NEWTON:
        edges, sums, _ = look_over(
            x, x_n, log_a, valid, z, g, 1.0, columns, column_ok, 0, tokens, tokens, depth, uniform,
            HAS_MASS, HAS_VALID, BLOCK_N, BLOCK_R, BLOCK_K, PRECISION,
        )  # fmt: skip
        y = implicit_solve(edges, sums, y, columns, column_ok, rank)
        tl.store(grad_potentials + columns, y, column_ok)
    else:
        y = _pull_sweeps(
            x, x_n, log_a, valid, z, log_pivots, potentials, grad_potentials, y, newest, columns, column_ok, tokens,
            rank, depth, uniform, iters - 1, HAS_MASS, HAS_VALID, TILE, BLOCK_R, BLOCK_K, PRECISION,
        )  # fmt: skip
        tl.debug_barrier()  # the gradients of the potentials are read by other threads than wrote them
    for first_d in range(0, depth, BLOCK_D):
        total = pull_tokens(
            x, x_n, v, v_n, log_a, valid, z, log_pivots, potentials, grad_potentials, y, u, grad_u, grad_out, out_n,
            grad_x + head * tokens * depth, grad_v + head * tokens * width, grad_log_a + head * tokens,
            columns, column_ok, 0, tokens, tokens, rank, depth, first_d, width, iters, slots, uniform, first_d == 0,
            KEYS, NEWTON, HAS_MASS, HAS_VALID, MASS_GRADIENT, BLOCK_N, BLOCK_R, BLOCK_K, BLOCK_D, PRECISION,
        )  # fmt: skip
        d = first_d + tl.arange(0, BLOCK_D)
        at = grad_z + head * rank * depth + columns[:, None] * depth + d[None, :]
        tl.store(at, total, column_ok[:, None] & (d < depth)[None, :])
