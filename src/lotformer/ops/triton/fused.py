# mypy: disable-error-code="no-untyped-def"
"""One program for each (sample, head), when all its scores fit on chip: every sweep runs on registers.

Potentials are kept as `(B, H, slots, R)`. Sinkhorn: slot t is the potential before sweep t, the last slot the
potential after the last sweep. Newton: slot 0 is the solution, slot 1 what one sweep makes of it. In both cases
the query plan is `softmax_j(s + g)` at the last slot (Newton: the first), and the key plan, of which column j is
divided by its sum, comes out of the last two slots.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .algebra import implicit_solve, newton_potential
from .tiles import (
    inner_products,
    log_masses,
    real_rows,
    reverse_sweep,
    row_lse,
    row_softmax,
    scores,
    store_product,
    store_transposed_product,
    sweep,
    column_lse,
)


@triton.jit
def forward_kernel(
    q, k, v, z, log_m, query_log_a, key_log_a, query_valid, key_valid, out, query_g, key_g, u,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    query_a_b, query_a_h, key_a_b, key_a_h, query_valid_b, key_valid_b, key_valid_h,
    heads, n, m, rank, depth, width, iters, query_uniform, key_uniform, tol, passes,
    NEWTON: tl.constexpr, QUERY_MASS: tl.constexpr, KEY_MASS: tl.constexpr,
    QUERY_VALID: tl.constexpr, KEY_VALID: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Both plans and the output of one head."""
    head = tl.program_id(0).to(tl.int64)
    b, h = head // heads, head % heads
    columns = tl.arange(0, BLOCK_R)
    column_ok = columns < rank
    z += h * rank * depth
    log_pivots = tl.load(log_m + h * rank + columns, column_ok, 0.0)
    slots = tl.where(NEWTON, 2, iters + 1)
    query_g += head * slots * rank
    key_g += head * slots * rank

    ok = real_rows(query_valid + b * query_valid_b, 0, n, QUERY_VALID, BLOCK_N)
    log_a = log_masses(query_log_a + b * query_a_b + h * query_a_h, 0, n, query_uniform, QUERY_MASS, BLOCK_N)
    s = scores(q + b * q_b + h * q_h, q_n, ok, z, columns, column_ok, depth, BLOCK_N, BLOCK_R, BLOCK_K, PRECISION)
    g = tl.zeros([BLOCK_R], tl.float32)
    if NEWTON:
        g = newton_potential(s, tl.exp(log_a), log_pivots, columns, column_ok, rank, tol, passes, PRECISION)
        tl.store(query_g + columns, g, column_ok)
        tl.store(query_g + rank + columns, g, column_ok)
    else:
        tl.store(query_g + columns, g, column_ok)
        for t in range(iters):
            g = sweep(s, log_a, log_pivots, g, column_ok)
            tl.store(query_g + (t + 1) * rank + columns, g, column_ok)
    query_plan = tl.where(ok[:, None], row_softmax(s + g[None, :]), 0.0)

    key_ok = real_rows(key_valid + b * key_valid_b + h * key_valid_h, 0, m, KEY_VALID, BLOCK_M)
    log_a = log_masses(key_log_a + b * key_a_b + h * key_a_h, 0, m, key_uniform, KEY_MASS, BLOCK_M)
    s = scores(k + b * k_b + h * k_h, k_n, key_ok, z, columns, column_ok, depth, BLOCK_M, BLOCK_R, BLOCK_K, PRECISION)
    if NEWTON:
        g = newton_potential(s, tl.exp(log_a), log_pivots, columns, column_ok, rank, tol, passes, PRECISION)
        tl.store(key_g + columns, g, column_ok)
        last = 1
    else:
        g = tl.where(column_ok, log_pivots - column_lse(s + log_a[:, None]), 0.0)
        tl.store(key_g + columns, g, column_ok)
        for t in range(1, iters):
            g = sweep(s, log_a, log_pivots, g, column_ok)
            tl.store(key_g + t * rank + columns, g, column_ok)
        last = iters
    t = s + (log_a - row_lse(s + g[None, :]))[:, None]
    lse = column_lse(t)
    tl.store(key_g + last * rank + columns, log_pivots - lse, column_ok)
    key_plan = tl.trans(tl.where(column_ok[None, :], tl.exp(t - lse[None, :]), 0.0))

    v += b * v_b + h * v_h
    u += head * rank * width
    out += head * n * width
    rows = tl.arange(0, BLOCK_M)
    out_rows = tl.arange(0, BLOCK_N)
    for start in range(0, width, BLOCK_K):
        d = start + tl.arange(0, BLOCK_K)
        inside = d < width
        values = tl.load(v + rows[:, None] * v_n + d[None, :], key_ok[:, None] & inside[None, :], 0.0)
        carried = tl.dot(key_plan, values.to(tl.float32), input_precision=PRECISION)
        tl.store(u + columns[:, None] * width + d[None, :], carried, column_ok[:, None] & inside[None, :])
        mixed = tl.dot(query_plan, carried, input_precision=PRECISION).to(out.dtype.element_ty)
        tl.store(out + out_rows[:, None] * width + d[None, :], mixed, (out_rows < n)[:, None] & inside[None, :])


@triton.jit
def backward_query_kernel(
    q, z, log_m, log_a_ptr, valid, potentials, u, grad_out,
    grad_q, grad_z, grad_u, grad_log_a, grad_potentials,
    q_b, q_h, q_n, a_b, a_h, valid_b, out_b, out_h, out_n,
    heads, n, rank, depth, width, iters, uniform,
    NEWTON: tl.constexpr, HAS_MASS: tl.constexpr, HAS_VALID: tl.constexpr, MASS_GRADIENT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """From the gradient of the output to those of the queries, of `u = Wᵀ v` and of the pivots through the queries."""
    head = tl.program_id(0).to(tl.int64)
    b, h = head // heads, head % heads
    columns = tl.arange(0, BLOCK_R)
    column_ok = columns < rank
    z += h * rank * depth
    log_pivots = tl.load(log_m + h * rank + columns, column_ok, 0.0)
    slots = tl.where(NEWTON, 2, iters + 1)
    potentials += head * slots * rank
    grad_potentials += head * slots * rank
    q += b * q_b + h * q_h
    grad_out += b * out_b + h * out_h

    ok = real_rows(valid + b * valid_b, 0, n, HAS_VALID, BLOCK_N)
    log_a = log_masses(log_a_ptr + b * a_b + h * a_h, 0, n, uniform, HAS_MASS, BLOCK_N)
    s = scores(q, q_n, ok, z, columns, column_ok, depth, BLOCK_N, BLOCK_R, BLOCK_K, PRECISION)
    g = tl.load(potentials + (slots - 1) * rank + columns, column_ok, 0.0)
    p = row_softmax(s + g[None, :])
    plan = tl.where(ok[:, None], p, 0.0)
    store_transposed_product(
        grad_u + head * rank * width, plan, grad_out, out_n, ok, columns, column_ok, width, BLOCK_N, BLOCK_K, PRECISION
    )
    pull = inner_products(
        grad_out, out_n, ok, u + head * rank * width, columns, column_ok, width, BLOCK_N, BLOCK_R, BLOCK_K, PRECISION
    )
    grad_s = plan * (pull - tl.sum(plan * pull, 1)[:, None])
    y = tl.sum(grad_s, 0)
    lost = tl.zeros([BLOCK_N], tl.float32)
    if NEWTON:
        a = tl.exp(log_a)
        weighted = a[:, None] * p
        edges = tl.dot(tl.trans(weighted), p, input_precision=PRECISION)
        y = implicit_solve(edges, tl.sum(weighted, 0), y, columns, column_ok, rank)
        tl.store(grad_potentials + columns, y, column_ok)
        mean = tl.sum(p * y[None, :], 1)
        grad_s -= weighted * (y[None, :] - mean[:, None])
        lost = a * mean
    else:
        for back in range(iters):
            t = iters - 1 - back
            tl.store(grad_potentials + (t + 1) * rank + columns, y, column_ok)
            g_next = g
            g = tl.load(potentials + t * rank + columns, column_ok, 0.0)
            change, given, y = reverse_sweep(s, log_a, log_pivots, g, g_next, y)
            grad_s += change
            lost += given
    rows = tl.arange(0, BLOCK_N)
    if MASS_GRADIENT:
        tl.store(grad_log_a + head * n + rows, -lost, rows < n)
    grad_s = tl.where(ok[:, None] & column_ok[None, :], grad_s, 0.0)
    store_product(
        grad_q + head * n * depth, depth, rows < n, grad_s, z, columns, column_ok, 0, depth, depth,
        BLOCK_N, BLOCK_K, PRECISION,
    )  # fmt: skip
    store_transposed_product(
        grad_z + head * rank * depth, grad_s, q, q_n, ok, columns, column_ok, depth, BLOCK_N, BLOCK_K, PRECISION
    )


@triton.jit
def backward_key_kernel(
    k, v, z, log_m, log_a_ptr, valid, potentials, u, grad_u,
    grad_k, grad_v, grad_z, grad_log_a, grad_potentials,
    k_b, k_h, k_n, v_b, v_h, v_n, a_b, a_h, valid_b, valid_h,
    heads, m, rank, depth, width, iters, uniform,
    NEWTON: tl.constexpr, HAS_MASS: tl.constexpr, HAS_VALID: tl.constexpr, MASS_GRADIENT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """From the gradient of `u = Wᵀ v` to those of the keys, the values and of the pivots through the keys."""
    head = tl.program_id(0).to(tl.int64)
    b, h = head // heads, head % heads
    columns = tl.arange(0, BLOCK_R)
    column_ok = columns < rank
    z += h * rank * depth
    log_pivots = tl.load(log_m + h * rank + columns, column_ok, 0.0)
    slots = tl.where(NEWTON, 2, iters + 1)
    potentials += head * slots * rank
    grad_potentials += head * slots * rank
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    u += head * rank * width
    grad_u += head * rank * width

    ok = real_rows(valid + b * valid_b + h * valid_h, 0, m, HAS_VALID, BLOCK_N)
    log_a = log_masses(log_a_ptr + b * a_b + h * a_h, 0, m, uniform, HAS_MASS, BLOCK_N)
    s = scores(k, k_n, ok, z, columns, column_ok, depth, BLOCK_N, BLOCK_R, BLOCK_K, PRECISION)
    g = tl.load(potentials + (slots - 2) * rank + columns, column_ok, 0.0)
    g_next = tl.load(potentials + (slots - 1) * rank + columns, column_ok, 0.0)
    t = s + g[None, :]
    f = row_lse(t)
    p = tl.exp(t - f[:, None])
    plan = tl.exp(s + (log_a - f)[:, None] + (g_next - log_pivots)[None, :])
    rows = tl.arange(0, BLOCK_N)
    pull = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    carried = tl.zeros([BLOCK_R], tl.float32)
    for start in range(0, width, BLOCK_K):
        d = start + tl.arange(0, BLOCK_K)
        inside = d < width
        at = columns[:, None] * width + d[None, :]
        pivot_gradient = tl.load(grad_u + at, column_ok[:, None] & inside[None, :], 0.0)
        pivot_value = tl.load(u + at, column_ok[:, None] & inside[None, :], 0.0)
        values = tl.load(v + rows[:, None] * v_n + d[None, :], ok[:, None] & inside[None, :], 0.0).to(tl.float32)
        carried += tl.sum(pivot_gradient * pivot_value, 1)
        pull = tl.dot(values, tl.trans(pivot_gradient), pull, input_precision=PRECISION)
        value_gradient = tl.dot(plan, pivot_gradient, input_precision=PRECISION)
        value_gradient = tl.where(ok[:, None], value_gradient, 0.0).to(grad_v.dtype.element_ty)
        target = grad_v + head * m * width + rows[:, None] * width + d[None, :]
        tl.store(target, value_gradient, (rows < m)[:, None] & inside[None, :])
    moved = plan * (pull - carried[None, :])
    gained = tl.sum(moved, 1)
    forwarded = p * gained[:, None]
    grad_s = moved - forwarded
    y = -tl.sum(forwarded, 0)
    if NEWTON:
        a = tl.exp(log_a)
        weighted = a[:, None] * p
        edges = tl.dot(tl.trans(weighted), p, input_precision=PRECISION)
        y = implicit_solve(edges, tl.sum(weighted, 0), y, columns, column_ok, rank)
        tl.store(grad_potentials + columns, y, column_ok)
        mean = tl.sum(p * y[None, :], 1)
        grad_s -= weighted * (y[None, :] - mean[:, None])
        gained -= a * mean
    else:
        for back in range(iters - 1):
            i = iters - 2 - back
            tl.store(grad_potentials + (i + 1) * rank + columns, y, column_ok)
            g_next = g
            g = tl.load(potentials + i * rank + columns, column_ok, 0.0)
            change, given, y = reverse_sweep(s, log_a, log_pivots, g, g_next, y)
            grad_s += change
            gained -= given
        tl.store(grad_potentials + columns, y, column_ok)
        moved = tl.exp(s + log_a[:, None] + (g - log_pivots)[None, :]) * y[None, :]
        grad_s -= moved
        gained -= tl.sum(moved, 1)
    if MASS_GRADIENT:
        tl.store(grad_log_a + head * m + rows, gained, rows < m)
    grad_s = tl.where(ok[:, None] & column_ok[None, :], grad_s, 0.0)
    store_product(
        grad_k + head * m * depth, depth, rows < m, grad_s, z, columns, column_ok, 0, depth, depth,
        BLOCK_N, BLOCK_K, PRECISION,
    )  # fmt: skip
    store_transposed_product(
        grad_z + head * rank * depth, grad_s, k, k_n, ok, columns, column_ok, depth, BLOCK_N, BLOCK_K, PRECISION
    )
