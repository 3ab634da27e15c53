# mypy: disable-error-code="no-untyped-def"
"""Passes over the tokens, for sequences whose scores do not fit on chip.

A program owns a chunk of one head's tokens and walks through it (see `blocks`). What a pass learns about the pivots,
r numbers per chunk, goes to a small buffer that the next pass reduces in a fixed order: no
atomics, and the same bits in every run. The slots of the potentials are those of `fused`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import (
    GROUP,
    carry_values,
    mix,
    pull_output,
    pull_sweep,
    pull_tokens,
    pull_values,
    reduced_sum,
    row_products,
    sum_columns,
)
from .tiles import FREE, NEGATIVE, pivot_masses


@triton.jit
def _reduced_lse(partials, chunks, rank, columns, column_ok, BLOCK_R: tl.constexpr):
    """Log of the column sums from each chunk's `(max, sum)`, `(chunks, 2, R)`."""
    top = tl.full([BLOCK_R], NEGATIVE, tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    for start in range(0, chunks, GROUP):
        at = start + tl.arange(0, GROUP)
        ok = (at < chunks)[:, None] & column_ok[None, :]
        pointer = partials + at[:, None] * 2 * rank + columns[None, :]
        tops = tl.load(pointer, ok, NEGATIVE)
        sums = tl.load(pointer + rank, ok, 0.0)
        higher = tl.maximum(top, tl.max(tops, 0))
        total = total * tl.exp(top - higher) + tl.sum(sums * tl.exp(tops - higher[None, :]), 0)
        top = higher
    return tl.where(column_ok, top + tl.log(tl.where(column_ok, total, 1.0)), 0.0)


@triton.jit
def _potential(
    potentials, partials, log_m, slot, chunk_id, chunks, rank, columns, column_ok,
    REDUCE: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """The potential in a slot, reduced from what the pass before left and then kept there, or found there."""
    if REDUCE:
        lse = _reduced_lse(partials, chunks, rank, columns, column_ok, BLOCK_R)
        g = tl.where(column_ok, log_m - lse, 0.0)
        if chunk_id == 0:
            tl.store(potentials + slot * rank + columns, g, column_ok)
    else:
        g = tl.load(potentials + slot * rank + columns, column_ok, 0.0)
    return g


@triton.jit(do_not_specialize=FREE)
def sweep_kernel(
    x, z, log_m, log_a_ptr, valid, potentials, partials_in, partials_out,
    x_b, x_h, x_n, a_b, a_h, valid_b, valid_h, z_b, z_h, m_b,
    heads, tokens, rank, depth, slots, slot, chunk, chunks, uniform,
    FROM_TOKENS: tl.constexpr, REDUCE: tl.constexpr, HAS_MASS: tl.constexpr, HAS_VALID: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Half of a sweep: with the token potentials that belong to `slot` (zero if `FROM_TOKENS`), sum the columns."""
    head = tl.program_id(0).to(tl.int64)
    chunk_id = tl.program_id(1)
    b, h = head // heads, head % heads
    columns = tl.arange(0, BLOCK_R)
    column_ok = columns < rank
    z += b * z_b + h * z_h
    x += b * x_b + h * x_h
    log_a_ptr += b * a_b + h * a_h
    valid += b * valid_b + h * valid_h
    log_pivots = pivot_masses(log_m, m_b, head, heads, rank, columns, column_ok)
    g = tl.zeros([BLOCK_R], tl.float32)
    if not FROM_TOKENS:
        g = _potential(
            potentials + head * slots * rank, partials_in + head * chunks * 2 * rank, log_pivots, slot, chunk_id,
            chunks, rank, columns, column_ok, REDUCE, BLOCK_R,
        )  # fmt: skip
    first = chunk_id * chunk
    last = tl.minimum(first + chunk, tokens)
    top, total = sum_columns(
        x, x_n, log_a_ptr, valid, z, g, columns, column_ok, first, last, tokens, depth, uniform,
        FROM_TOKENS, HAS_MASS, HAS_VALID, BLOCK_N, BLOCK_R, BLOCK_K, PRECISION,
    )  # fmt: skip
    partials_out += (head * chunks + chunk_id) * 2 * rank + columns
    tl.store(partials_out, top, column_ok)
    tl.store(partials_out + rank, total, column_ok)


@triton.jit(do_not_specialize=FREE)
def values_kernel(
    k, v, z, log_m, log_a_ptr, valid, potentials, partials_in, partials_out, u_partials,
    k_b, k_h, k_n, v_b, v_h, v_n, a_b, a_h, valid_b, valid_h, z_b, z_h, m_b,
    heads, tokens, rank, depth, width, slots, slot, chunk, chunks, uniform,
    SOLVED: tl.constexpr, REDUCE: tl.constexpr, HAS_MASS: tl.constexpr, HAS_VALID: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`Wᵀ v` of a chunk of keys, columns of W relative to their largest entry in the chunk."""
    head = tl.program_id(0).to(tl.int64)
    chunk_id = tl.program_id(1)
    b, h = head // heads, head % heads
    columns = tl.arange(0, BLOCK_R)
    column_ok = columns < rank
    z += b * z_b + h * z_h
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    log_a_ptr += b * a_b + h * a_h
    valid += b * valid_b + h * valid_h
    g = tl.zeros([BLOCK_R], tl.float32)
    if SOLVED:
        log_pivots = pivot_masses(log_m, m_b, head, heads, rank, columns, column_ok)
        g = _potential(
            potentials + head * slots * rank, partials_in + head * chunks * 2 * rank, log_pivots, slot,
            chunk_id + tl.program_id(2), chunks, rank, columns, column_ok, REDUCE, BLOCK_R,
        )  # fmt: skip
    first = chunk_id * chunk
    last = tl.minimum(first + chunk, tokens)
    first_d = tl.program_id(2) * BLOCK_D
    d = first_d + tl.arange(0, BLOCK_D)
    inside = d < width
    top, total, carried = carry_values(
        k, k_n, v, v_n, log_a_ptr, valid, z, g, columns, column_ok, first, last, tokens, depth, first_d, width, uniform,
        not SOLVED, HAS_MASS, HAS_VALID, BLOCK_N, BLOCK_R, BLOCK_K, BLOCK_D, PRECISION,
    )  # fmt: skip
    slot_out = head * chunks + chunk_id
    if tl.program_id(2) == 0:
        tl.store(partials_out + slot_out * 2 * rank + columns, top, column_ok)
        tl.store(partials_out + (slot_out * 2 + 1) * rank + columns, total, column_ok)
    u_partials += slot_out * rank * width
    tl.store(u_partials + columns[:, None] * width + d[None, :], carried, column_ok[:, None] & inside[None, :])


@triton.jit(do_not_specialize=FREE)
def combine_kernel(
    partials, u_partials, log_m, potentials, u,
    m_b, heads, rank, width, slots, chunks,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`Wᵀ v` of a head from its chunks, and the last slot of the key potentials."""
    head = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_R)
    column_ok = columns < rank
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    ok = column_ok[:, None] & (d < width)[None, :]
    partials += head * chunks * 2 * rank
    u_partials += head * chunks * rank * width
    lse = _reduced_lse(partials, chunks, rank, columns, column_ok, BLOCK_R)
    carried = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for c in range(chunks):
        top = tl.load(partials + c * 2 * rank + columns, column_ok, NEGATIVE)
        part = tl.load(u_partials + c * rank * width + columns[:, None] * width + d[None, :], ok, 0.0)
        carried += part * tl.exp(top - lse)[:, None]
    tl.store(u + head * rank * width + columns[:, None] * width + d[None, :], carried, ok)
    if tl.program_id(1) == 0:
        log_pivots = pivot_masses(log_m, m_b, head, heads, rank, columns, column_ok)
        tl.store(potentials + (head * slots + slots - 1) * rank + columns, log_pivots - lse, column_ok)


@triton.jit(do_not_specialize=FREE)
def output_kernel(
    q, z, log_m, valid, potentials, partials, u, out,
    q_b, q_h, q_n, valid_b, z_b, z_h, m_b,
    heads, tokens, rank, depth, width, slots, slot, chunk, chunks,
    REDUCE: tl.constexpr, HAS_VALID: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`P u` for a chunk of queries."""
    head = tl.program_id(0).to(tl.int64)
    chunk_id = tl.program_id(1)
    b, h = head // heads, head % heads
    columns = tl.arange(0, BLOCK_R)
    column_ok = columns < rank
    z += b * z_b + h * z_h
    q += b * q_b + h * q_h
    valid += b * valid_b
    out += head * tokens * width
    log_pivots = pivot_masses(log_m, m_b, head, heads, rank, columns, column_ok)
    g = _potential(
        potentials + head * slots * rank, partials + head * chunks * 2 * rank, log_pivots, slot, chunk_id,
        chunks, rank, columns, column_ok, REDUCE, BLOCK_R,
    )  # fmt: skip
    first = chunk_id * chunk
    last = tl.minimum(first + chunk, tokens)
    mix(
        q, q_n, valid, z, g, u + head * rank * width, out, columns, column_ok, first, last, tokens, rank, depth,
        width, HAS_VALID, BLOCK_N, BLOCK_R, BLOCK_K, PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=FREE)
def backward_output_kernel(
    q, z, valid, potentials, u, grad_out, y_partials, u_partials,
    q_b, q_h, q_n, valid_b, out_b, out_h, out_n, z_b, z_h,
    heads, tokens, rank, depth, width, slots, slot, chunk, chunks,
    HAS_VALID: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A chunk's part of the gradients of `u` and of the query potential in `slot`, of which the plan is made."""
    head = tl.program_id(0).to(tl.int64)
    chunk_id = tl.program_id(1)
    b, h = head // heads, head % heads
    columns = tl.arange(0, BLOCK_R)
    column_ok = columns < rank
    z += b * z_b + h * z_h
    q += b * q_b + h * q_h
    valid += b * valid_b
    u += head * rank * width
    grad_out += b * out_b + h * out_h
    g = tl.load(potentials + (head * slots + slot) * rank + columns, column_ok, 0.0)
    first = chunk_id * chunk
    last = tl.minimum(first + chunk, tokens)
    first_d = tl.program_id(2) * BLOCK_D
    d = first_d + tl.arange(0, BLOCK_D)
    inside = d < width
    y, carried = pull_output(
        q, q_n, valid, z, g, u, grad_out, out_n, columns, column_ok, first, last, tokens, depth, first_d, width,
        HAS_VALID, BLOCK_N, BLOCK_R, BLOCK_K, BLOCK_D, PRECISION,
    )  # fmt: skip
    slot_out = head * chunks + chunk_id
    if tl.program_id(2) == 0:
        tl.store(y_partials + slot_out * rank + columns, y, column_ok)
    u_partials += slot_out * rank * width
    tl.store(u_partials + columns[:, None] * width + d[None, :], carried, column_ok[:, None] & inside[None, :])


@triton.jit(do_not_specialize=FREE)
def backward_values_kernel(
    k, v, z, log_m, log_a_ptr, valid, potentials, u, grad_u, y_partials,
    k_b, k_h, k_n, v_b, v_h, v_n, a_b, a_h, valid_b, valid_h, z_b, z_h, m_b,
    heads, tokens, rank, depth, width, slots, slot, chunk, chunks, uniform,
    HAS_MASS: tl.constexpr, HAS_VALID: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A chunk's part of the gradient of the key potential in `slot`, of which the plan is made."""
    head = tl.program_id(0).to(tl.int64)
    chunk_id = tl.program_id(1)
    b, h = head // heads, head % heads
    columns = tl.arange(0, BLOCK_R)
    column_ok = columns < rank
    z += b * z_b + h * z_h
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    log_a_ptr += b * a_b + h * a_h
    valid += b * valid_b + h * valid_h
    u += head * rank * width
    grad_u += head * rank * width
    log_pivots = pivot_masses(log_m, m_b, head, heads, rank, columns, column_ok)
    potentials += (head * slots + slot) * rank + columns
    g = tl.load(potentials, column_ok, 0.0)
    g_next = tl.load(potentials + rank, column_ok, 0.0) - log_pivots
    carried = row_products(u, grad_u, columns, column_ok, width, BLOCK_R, BLOCK_K)
    first = chunk_id * chunk
    last = tl.minimum(first + chunk, tokens)
    y = pull_values(
        k, k_n, v, v_n, log_a_ptr, valid, z, g, g_next, carried, grad_u, columns, column_ok, first, last, tokens, depth,
        width, uniform, HAS_MASS, HAS_VALID, BLOCK_N, BLOCK_R, BLOCK_K, PRECISION,
    )  # fmt: skip
    tl.store(y_partials + (head * chunks + chunk_id) * rank + columns, y, column_ok)


@triton.jit(do_not_specialize=FREE)
def backward_sweep_kernel(
    x, z, log_m, log_a_ptr, valid, potentials, grad_potentials, partials_in, partials_out,
    x_b, x_h, x_n, a_b, a_h, valid_b, valid_h, z_b, z_h, m_b,
    heads, tokens, rank, depth, slots, slot, chunk, chunks, uniform,
    HAS_MASS: tl.constexpr, HAS_VALID: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """From the gradient of the potential in `slot + 1` to a chunk's part of that in `slot`."""
    head = tl.program_id(0).to(tl.int64)
    chunk_id = tl.program_id(1)
    b, h = head // heads, head % heads
    columns = tl.arange(0, BLOCK_R)
    column_ok = columns < rank
    z += b * z_b + h * z_h
    x += b * x_b + h * x_h
    log_a_ptr += b * a_b + h * a_h
    valid += b * valid_b + h * valid_h
    log_pivots = pivot_masses(log_m, m_b, head, heads, rank, columns, column_ok)
    here = (head * slots + slot) * rank + columns
    g = tl.load(potentials + here, column_ok, 0.0)
    g_next = tl.load(potentials + here + rank, column_ok, 0.0)
    y = reduced_sum(partials_in + head * chunks * rank, chunks, rank, columns, column_ok, BLOCK_R)
    if chunk_id == 0:
        tl.store(grad_potentials + here + rank, y, column_ok)
    first = chunk_id * chunk
    last = tl.minimum(first + chunk, tokens)
    total = pull_sweep(
        x, x_n, log_a_ptr, valid, z, log_pivots, g, g_next, y, columns, column_ok, first, last, tokens, depth, uniform,
        HAS_MASS, HAS_VALID, BLOCK_N, BLOCK_R, BLOCK_K, PRECISION,
    )  # fmt: skip
    tl.store(partials_out + (head * chunks + chunk_id) * rank + columns, total, column_ok)


@triton.jit(do_not_specialize=FREE)
def backward_tokens_kernel(
    x, v, z, log_m, log_a_ptr, valid, potentials, grad_potentials, u, grad_u, grad_out,
    grad_x, grad_v, grad_log_a, z_partials, sums,
    x_b, x_h, x_n, v_b, v_h, v_n, a_b, a_h, valid_b, valid_h, out_b, out_h, out_n, z_b, z_h, m_b,
    heads, tokens, rank, depth, width, slots, slot, sweeps, chunk, chunks, uniform,
    KEYS: tl.constexpr, SOLVED: tl.constexpr, NEWTON: tl.constexpr, HAS_MASS: tl.constexpr, HAS_VALID: tl.constexpr,
    MASS_GRADIENT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The last pass: gradients of the tokens of one side, and a chunk's part of what `pull_tokens` returns."""
    head = tl.program_id(0).to(tl.int64)
    chunk_id = tl.program_id(1)
    leader = tl.program_id(2) == 0
    b, h = head // heads, head % heads
    columns = tl.arange(0, BLOCK_R)
    column_ok = columns < rank
    z += b * z_b + h * z_h
    x += b * x_b + h * x_h
    log_a_ptr += b * a_b + h * a_h
    valid += b * valid_b + h * valid_h
    log_pivots = pivot_masses(log_m, m_b, head, heads, rank, columns, column_ok)
    potentials += head * slots * rank
    grad_potentials += head * slots * rank
    first = chunk_id * chunk
    last = tl.minimum(first + chunk, tokens)
    first_d = tl.program_id(2) * BLOCK_D
    d = first_d + tl.arange(0, BLOCK_D)
    numbers = rank if depth is None else depth  # of a token
    total, column_sums = pull_tokens(
        x, x_n, v + b * v_b + h * v_h, v_n, log_a_ptr, valid, z, log_pivots, potentials, grad_potentials,
        u + head * rank * width, grad_u + head * rank * width, grad_out + b * out_b + h * out_h, out_n,
        grad_x + head * tokens * numbers, grad_v + head * tokens * width, grad_log_a + head * tokens,
        columns, column_ok, first, last, tokens, rank, depth, first_d, width, slot, sweeps, uniform, leader,
        KEYS, SOLVED, NEWTON, HAS_MASS, HAS_VALID, MASS_GRADIENT, BLOCK_N, BLOCK_R, BLOCK_K, BLOCK_D, PRECISION,
    )  # fmt: skip
    slot_out = head * chunks + chunk_id
    if depth is None:
        tl.store(z_partials + slot_out * rank + columns, total, column_ok)
    else:
        z_partials += slot_out * rank * depth
        tl.store(z_partials + columns[:, None] * depth + d[None, :], total, column_ok[:, None] & (d < depth)[None, :])
    if not SOLVED:
        tl.store(sums + slot_out * rank + columns, column_sums, column_ok & leader)
