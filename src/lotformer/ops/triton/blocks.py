# mypy: disable-error-code="no-untyped-def"
"""Walks over the tokens `first … last` of one head, a block at a time, and what they sum up.

Scores are formed again from the tokens in each walk; where scores are given, `depth` is None and they are read. `x`,
`log_a`, `valid`, `v`, `grad_out` point to the head's first token, `z`, `u`, `grad_u` to its pivots (or `z` to its
temperature), `potentials` to its first slot; see `fused` for the slots.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .algebra import look, score_spread
from .tiles import (
    NEGATIVE,
    inner_products,
    log_masses,
    real_rows,
    reverse_sweep,
    row_lse,
    row_softmax,
    scores,
    store_product,
)

GROUP = tl.constexpr(16)  # chunks reduced at a time


@triton.jit
def reduced_sum(partials, chunks, rank, columns, column_ok, BLOCK_R: tl.constexpr):
    """Sum over chunks of `(chunks, R)`."""
    total = tl.zeros([BLOCK_R], tl.float32)
    for start in range(0, chunks, GROUP):
        at = start + tl.arange(0, GROUP)
        ok = (at < chunks)[:, None] & column_ok[None, :]
        total += tl.sum(tl.load(partials + at[:, None] * rank + columns[None, :], ok, 0.0), 0)
    return total


@triton.jit
def sum_columns(
    x, x_n, log_a, valid, z, g, columns, column_ok, first, last, tokens, depth, uniform,
    FROM_TOKENS: tl.constexpr, HAS_MASS: tl.constexpr, HAS_VALID: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Largest term and sum of each column of `a exp(s + f)`, `f` belonging to `g`, or zero if `FROM_TOKENS`."""
    top = tl.full([BLOCK_R], NEGATIVE, tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    for start in range(first, last, BLOCK_N):
        ok = real_rows(valid, start, tokens, HAS_VALID, BLOCK_N)
        t = log_masses(log_a, start, tokens, uniform, HAS_MASS, BLOCK_N)
        block = x + tl.cast(start, tl.int64) * x_n
        s = scores(block, x_n, ok, z, columns, column_ok, depth, BLOCK_N, BLOCK_R, BLOCK_K, PRECISION)
        if not FROM_TOKENS:
            t -= row_lse(s + g[None, :])
        s += t[:, None]
        higher = tl.maximum(top, tl.max(s, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(s - higher[None, :]), 0)
        top = higher
    return top, total


@triton.jit
def carry_values(
    k, k_n, v, v_n, log_a, valid, z, g, columns, column_ok, first, last, tokens, depth, first_d, width, uniform,
    FROM_TOKENS: tl.constexpr, HAS_MASS: tl.constexpr, HAS_VALID: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As `sum_columns`, and the sums of `v` by column, from coordinate `first_d` on, relative to the largest term."""
    rows = tl.arange(0, BLOCK_N)
    d = first_d + tl.arange(0, BLOCK_D)
    inside = d < width
    top = tl.full([BLOCK_R], NEGATIVE, tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    carried = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for start in range(first, last, BLOCK_N):
        ok = real_rows(valid, start, tokens, HAS_VALID, BLOCK_N)
        t = log_masses(log_a, start, tokens, uniform, HAS_MASS, BLOCK_N)
        offset = tl.cast(start, tl.int64)
        s = scores(k + offset * k_n, k_n, ok, z, columns, column_ok, depth, BLOCK_N, BLOCK_R, BLOCK_K, PRECISION)
        if not FROM_TOKENS:
            t -= row_lse(s + g[None, :])
        s += t[:, None]
        higher = tl.maximum(top, tl.max(s, 0))
        shrink = tl.exp(top - higher)
        weights = tl.exp(s - higher[None, :])
        total = total * shrink + tl.sum(weights, 0)
        top = higher
        values = tl.load(v + offset * v_n + rows[:, None] * v_n + d[None, :], ok[:, None] & inside[None, :], 0.0)
        carried = tl.dot(
            tl.trans(weights), values.to(tl.float32), carried * shrink[:, None], input_precision=PRECISION
        )  # fmt: skip
    return top, total, carried


@triton.jit
def mix(
    q, q_n, valid, z, g, u, out, columns, column_ok, first, last, tokens, rank, depth, width,
    HAS_VALID: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store `P u`, rows of padding zero."""
    for start in range(first, last, BLOCK_N):
        ok = real_rows(valid, start, tokens, HAS_VALID, BLOCK_N)
        offset = tl.cast(start, tl.int64)
        s = scores(q + offset * q_n, q_n, ok, z, columns, column_ok, depth, BLOCK_N, BLOCK_R, BLOCK_K, PRECISION)
        plan = tl.where(ok[:, None], row_softmax(s + g[None, :]), 0.0)
        inside = start + tl.arange(0, BLOCK_N) < tokens
        store_product(
            out + offset * width, width, inside, plan, u, rank, 0, width, width,
            BLOCK_N, BLOCK_K, PRECISION,
        )  # fmt: skip


@triton.jit
def pull_output(
    q, q_n, valid, z, g, u, grad_out, out_n, columns, column_ok, first, last, tokens, depth, first_d, width,
    HAS_VALID: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the query potential `g` and of `u`, from its coordinate `first_d` on."""
    rows = tl.arange(0, BLOCK_N)
    d = first_d + tl.arange(0, BLOCK_D)
    inside = d < width
    y = tl.zeros([BLOCK_R], tl.float32)
    carried = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for start in range(first, last, BLOCK_N):
        ok = real_rows(valid, start, tokens, HAS_VALID, BLOCK_N)
        offset = tl.cast(start, tl.int64)
        s = scores(q + offset * q_n, q_n, ok, z, columns, column_ok, depth, BLOCK_N, BLOCK_R, BLOCK_K, PRECISION)
        plan = tl.where(ok[:, None], row_softmax(s + g[None, :]), 0.0)
        block = grad_out + offset * out_n
        pull = inner_products(block, out_n, ok, u, columns, column_ok, width, BLOCK_N, BLOCK_R, BLOCK_K, PRECISION)
        y += tl.sum(plan * (pull - tl.sum(plan * pull, 1)[:, None]), 0)
        gradient = tl.load(block + rows[:, None] * out_n + d[None, :], ok[:, None] & inside[None, :], 0.0)
        carried = tl.dot(tl.trans(plan), gradient.to(tl.float32), carried, input_precision=PRECISION)
    return y, carried


@triton.jit
def pull_values(
    k, k_n, v, v_n, log_a, valid, z, g, g_next, carried, grad_u, columns, column_ok, first, last, tokens, depth, width,
    uniform, HAS_MASS: tl.constexpr, HAS_VALID: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of the key potential `g`; `g_next` less the log masses of the pivots, `carried = u·grad_u`."""
    y = tl.zeros([BLOCK_R], tl.float32)
    for start in range(first, last, BLOCK_N):
        ok = real_rows(valid, start, tokens, HAS_VALID, BLOCK_N)
        log_masses_here = log_masses(log_a, start, tokens, uniform, HAS_MASS, BLOCK_N)
        offset = tl.cast(start, tl.int64)
        s = scores(k + offset * k_n, k_n, ok, z, columns, column_ok, depth, BLOCK_N, BLOCK_R, BLOCK_K, PRECISION)
        pull = inner_products(
            v + offset * v_n, v_n, ok, grad_u, columns, column_ok, width, BLOCK_N, BLOCK_R, BLOCK_K, PRECISION
        )  # fmt: skip
        t = s + g[None, :]
        f = row_lse(t)
        plan = tl.exp(s + (log_masses_here - f)[:, None] + g_next[None, :])
        gained = tl.sum(plan * (pull - carried[None, :]), 1)
        y -= tl.sum(tl.exp(t - f[:, None]) * gained[:, None], 0)
    return y


@triton.jit
def pull_sweep(
    x, x_n, log_a, valid, z, log_m, g, g_next, y, columns, column_ok, first, last, tokens, depth, uniform,
    HAS_MASS: tl.constexpr, HAS_VALID: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """From the gradient `y` of the potential `g_next` to that of the one before, `g`."""
    total = tl.zeros([BLOCK_R], tl.float32)
    for start in range(first, last, BLOCK_N):
        ok = real_rows(valid, start, tokens, HAS_VALID, BLOCK_N)
        log_masses_here = log_masses(log_a, start, tokens, uniform, HAS_MASS, BLOCK_N)
        block = x + tl.cast(start, tl.int64) * x_n
        s = scores(block, x_n, ok, z, columns, column_ok, depth, BLOCK_N, BLOCK_R, BLOCK_K, PRECISION)
        _, _, part = reverse_sweep(s, log_masses_here, log_m, g, g_next, y)
        total += part
    return total


@triton.jit
def row_products(x, y, columns, column_ok, width, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr):
    """`Σ_d x_jd y_jd` of two contiguous `(R, width)`."""
    total = tl.zeros([BLOCK_R], tl.float32)
    for start in range(0, width, BLOCK_K):
        d = start + tl.arange(0, BLOCK_K)
        ok = column_ok[:, None] & (d < width)[None, :]
        at = columns[:, None] * width + d[None, :]
        total += tl.sum(tl.load(x + at, ok, 0.0) * tl.load(y + at, ok, 0.0), 1)
    return total


@triton.jit
def pull_tokens(
    x, x_n, v, v_n, log_a, valid, z, log_m, potentials, grad_potentials, u, grad_u, grad_out, out_n,
    grad_x, grad_v, grad_log_a, columns, column_ok, first, last, tokens, rank, depth, first_d, width, slot, sweeps,
    uniform, leader,
    KEYS: tl.constexpr, SOLVED: tl.constexpr, NEWTON: tl.constexpr, HAS_MASS: tl.constexpr, HAS_VALID: tl.constexpr,
    MASS_GRADIENT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the gradients of the tokens of one side; return that of `z`, from its coordinate `first_d` on.

    And, if the side is not `SOLVED`, the column sums of the gradient of the scores: that of the potential `log m`.
    Where scores are given, the gradient of `z` is that of the temperature, in a part for each column.

    The gradient of the scores is summed over the sweeps while the block is on chip, so it never exists in memory.
    Only the `leader` stores what does not depend on `first_d`. `slot`: of the potential that the plan is made of.
    """
    rows = tl.arange(0, BLOCK_N)
    d = first_d + tl.arange(0, BLOCK_D)
    potentials += columns
    grad_potentials += columns
    if KEYS:
        carried = row_products(u, grad_u, columns, column_ok, width, BLOCK_R, BLOCK_K)
    if depth is None:
        temperature = tl.load(z)
        total = tl.zeros([BLOCK_R], tl.float32)
    else:
        total = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    sums = tl.zeros([BLOCK_R], tl.float32)
    for start in range(first, last, BLOCK_N):
        ok = real_rows(valid, start, tokens, HAS_VALID, BLOCK_N)
        log_masses_here = log_masses(log_a, start, tokens, uniform, HAS_MASS, BLOCK_N)
        inside = start + rows < tokens
        offset = tl.cast(start, tl.int64)
        s = scores(x + offset * x_n, x_n, ok, z, columns, column_ok, depth, BLOCK_N, BLOCK_R, BLOCK_K, PRECISION)
        if KEYS:
            f = tl.zeros([BLOCK_N], tl.float32)
            if SOLVED:
                t = s + tl.load(potentials + slot * rank, column_ok, 0.0)[None, :]
                f = row_lse(t)
                p = tl.exp(t - f[:, None])
            g_next = tl.load(potentials + (slot + 1) * rank, column_ok, 0.0)
            plan = tl.exp(s + (log_masses_here - f)[:, None] + (g_next - log_m)[None, :])
            if leader:
                store_product(
                    grad_v + offset * width, width, inside, tl.where(ok[:, None], plan, 0.0),
                    grad_u, rank, 0, width, width, BLOCK_N, BLOCK_K, PRECISION,
                )  # fmt: skip
            pull = inner_products(
                v + offset * v_n, v_n, ok, grad_u, columns, column_ok, width, BLOCK_N, BLOCK_R, BLOCK_K, PRECISION
            )  # fmt: skip
            grad_s = plan * (pull - carried[None, :])
            gained = tl.sum(grad_s, 1)
            if SOLVED:
                grad_s -= p * gained[:, None]
        else:
            pull = inner_products(
                grad_out + offset * out_n, out_n, ok, u, columns, column_ok, width,
                BLOCK_N, BLOCK_R, BLOCK_K, PRECISION,
            )  # fmt: skip
            p = row_softmax(s + tl.load(potentials + slot * rank, column_ok, 0.0)[None, :])
            plan = tl.where(ok[:, None], p, 0.0)
            grad_s = plan * (pull - tl.sum(plan * pull, 1)[:, None])
            gained = tl.zeros([BLOCK_N], tl.float32)
        if NEWTON:
            a = tl.exp(log_masses_here)
            y = tl.load(grad_potentials, column_ok, 0.0)
            mean = tl.sum(p * y[None, :], 1)
            grad_s -= a[:, None] * p * (y[None, :] - mean[:, None])
            gained -= a * mean
        else:
            for i in range(sweeps):
                at = potentials + i * rank
                y = tl.load(grad_potentials + (i + 1) * rank, column_ok, 0.0)
                change, given, _ = reverse_sweep(
                    s, log_masses_here, log_m, tl.load(at, column_ok, 0.0), tl.load(at + rank, column_ok, 0.0), y
                )  # fmt: skip
                grad_s += change
                gained -= given
            if KEYS and SOLVED:
                g, y = tl.load(potentials, column_ok, 0.0), tl.load(grad_potentials, column_ok, 0.0)
                moved = tl.exp(s + log_masses_here[:, None] + (g - log_m)[None, :]) * y[None, :]
                grad_s -= moved
                gained -= tl.sum(moved, 1)
        if MASS_GRADIENT:
            tl.store(grad_log_a + start + rows, gained, inside & leader)
        grad_s = tl.where(ok[:, None] & column_ok[None, :], grad_s, 0.0)
        if not SOLVED:
            sums += tl.sum(grad_s, 0)
        if depth is None:
            at = grad_x + offset * rank + rows[:, None] * rank + columns[None, :]
            scaled = (grad_s * temperature).to(grad_x.dtype.element_ty)
            tl.store(at, scaled, inside[:, None] & column_ok[None, :])
            total += tl.sum(grad_s * s, 0) / temperature
        else:
            store_product(
                grad_x + offset * depth, depth, inside, grad_s, z, rank,
                first_d, tl.minimum(first_d + BLOCK_D, depth), depth, BLOCK_N, BLOCK_K, PRECISION,
            )  # fmt: skip
            pointer = x + offset * x_n + rows[:, None] * x_n + d[None, :]
            block = tl.load(pointer, ok[:, None] & (d < depth)[None, :], 0.0)
            total = tl.dot(tl.trans(grad_s), block.to(tl.float32), total, input_precision=PRECISION)
    return total, sums


@triton.jit
def mean_scores(
    x, x_n, log_a, valid, z, columns, column_ok, first, last, tokens, depth, uniform,
    HAS_MASS: tl.constexpr, HAS_VALID: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`Σ_i a_i s_ij` and `Σ_i a_i range_j s_ij`."""
    mean = tl.zeros([BLOCK_R], tl.float32)
    spread = tl.full((), 0.0, tl.float32)
    for start in range(first, last, BLOCK_N):
        ok = real_rows(valid, start, tokens, HAS_VALID, BLOCK_N)
        a = tl.exp(log_masses(log_a, start, tokens, uniform, HAS_MASS, BLOCK_N))
        block = x + tl.cast(start, tl.int64) * x_n
        s = scores(block, x_n, ok, z, columns, column_ok, depth, BLOCK_N, BLOCK_R, BLOCK_K, PRECISION)
        mean += tl.sum(tl.where(column_ok[None, :], a[:, None] * s, 0.0), 0)
        spread += score_spread(s, a, column_ok)
    return mean, spread


@triton.jit
def look_over(
    x, x_n, log_a, valid, z, g, beta, columns, column_ok, first, last, tokens, depth, uniform,
    HAS_MASS: tl.constexpr, HAS_VALID: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`PᵀAP`, `b = Pᵀa` and `∂b/∂β` at `(g, β)`."""
    edges = tl.zeros([BLOCK_R, BLOCK_R], tl.float32)
    sums = tl.zeros([BLOCK_R], tl.float32)
    drift = tl.zeros([BLOCK_R], tl.float32)
    for start in range(first, last, BLOCK_N):
        ok = real_rows(valid, start, tokens, HAS_VALID, BLOCK_N)
        a = tl.exp(log_masses(log_a, start, tokens, uniform, HAS_MASS, BLOCK_N))
        block = x + tl.cast(start, tl.int64) * x_n
        s = scores(block, x_n, ok, z, columns, column_ok, depth, BLOCK_N, BLOCK_R, BLOCK_K, PRECISION)
        edges, block_sums, block_drift = look(edges, s, a, g, beta, PRECISION)
        sums += block_sums
        drift += block_drift
    return edges, sums, drift
