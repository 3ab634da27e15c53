# mypy: disable-error-code="no-untyped-def"
"""Pieces of kernels: a block of tokens against all pivots, held on chip.

A tile has a row for each token of the block and a column for each pivot. Columns that pad the number of pivots
to a power of two hold scores of `NEGATIVE`, rows without mass have the log mass `NEGATIVE`: both then vanish
from every sum without a test, and, unlike -inf, never make a NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

NEGATIVE = tl.constexpr(-1e38)

FREE = (
    "n", "m", "tokens", "chunk", "chunks", "iters", "sweeps", "slots", "slot", "passes", "last", "state_size",
)  # fmt: skip
"""Numbers that change from call to call and must not make Triton compile a kernel again."""


@triton.jit
def inner_products(
    x, stride, row_ok, y, columns, column_ok, depth,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`x yᵀ` for rows of `x` (any dtype, rows `stride` apart) and rows of `y` (fp32, contiguous), in fp32."""
    rows = tl.arange(0, BLOCK_N)
    tile = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    for start in range(0, depth, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < depth
        left = tl.load(x + rows[:, None] * stride + k[None, :], row_ok[:, None] & inside[None, :], 0.0)
        right = tl.load(y + columns[None, :] * depth + k[:, None], column_ok[None, :] & inside[:, None], 0.0)
        tile = tl.dot(left.to(tl.float32), right, tile, input_precision=PRECISION)
    return tile


@triton.jit
def scores(
    x, stride, row_ok, z, columns, column_ok, depth,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of a block of tokens, `NEGATIVE` in the columns that are no pivots.

    Tokens without a `depth` are scores themselves, and `z` is the temperature that they are multiplied by.
    """
    if depth is None:
        at = x + tl.arange(0, BLOCK_N)[:, None] * stride + columns[None, :]
        tile = tl.load(at, row_ok[:, None] & column_ok[None, :], 0.0).to(tl.float32) * tl.load(z)
    else:
        tile = inner_products(x, stride, row_ok, z, columns, column_ok, depth, BLOCK_N, BLOCK_R, BLOCK_K, PRECISION)
    return tl.where(column_ok[None, :], tile, NEGATIVE)


@triton.jit
def _times_rows(weights, y, k, inside, rank, depth, PRECISION: tl.constexpr):
    """`weights` times `y` (rank, depth) at columns `k`.

    A warp holds all the terms of a sum in registers, so a long sum is cut in parts for different warps.
    """
    columns = tl.arange(0, weights.shape[1])
    at = y + columns[:, None] * depth + k[None, :]
    rows = tl.load(at, (columns < rank)[:, None] & inside[None, :], 0.0)
    if weights.shape[1] > 64:
        parts: tl.constexpr = weights.shape[1] // 32
        left = tl.permute(tl.reshape(weights, [weights.shape[0], parts, 32]), (1, 0, 2))
        right = tl.reshape(rows, [parts, 32, rows.shape[1]])
        product = tl.sum(tl.dot(left, right, input_precision=PRECISION), 0)
    else:
        product = tl.dot(weights, rows, input_precision=PRECISION)
    return product


@triton.jit
def store_product(
    out, stride, row_ok, weights, y, rank, first, last, depth,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Columns `first … last` of `weights @ y` into rows of `out`, `y` (rank, depth) fp32 contiguous."""
    rows = tl.arange(0, BLOCK_N)
    for start in range(first, last, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < last
        product = _times_rows(weights, y, k, inside, rank, depth, PRECISION)
        target = out + rows[:, None] * stride + k[None, :]
        tl.store(target, product.to(out.dtype.element_ty), row_ok[:, None] & inside[None, :])


@triton.jit
def pivot_masses(log_m, m_b, head, heads, rank, columns, column_ok):
    """Log masses of a head's pivots; `m_b` from sample to sample, 0 if they share them."""
    return tl.load(log_m + (head // heads) * m_b + (head % heads) * rank + columns, column_ok, 0.0)


@triton.jit
def log_masses(log_a, start, tokens, uniform, HAS_MASS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Log masses of a block of tokens: loaded, or the same for all."""
    rows = start + tl.arange(0, BLOCK_N)
    inside = rows < tokens
    if HAS_MASS:
        result = tl.maximum(tl.load(log_a + rows, inside, NEGATIVE), NEGATIVE)
    else:
        result = tl.where(inside, uniform, NEGATIVE)
    return result


@triton.jit
def real_rows(valid, start, tokens, HAS_VALID: tl.constexpr, BLOCK_N: tl.constexpr):
    """Mask of the rows of the block that are tokens, not padding."""
    rows = start + tl.arange(0, BLOCK_N)
    inside = rows < tokens
    if HAS_VALID:
        inside = inside & (tl.load(valid + rows, inside, 0) != 0)
    return inside


@triton.jit
def row_lse(tile):
    top = tl.max(tile, 1)
    return top + tl.log(tl.sum(tl.exp(tile - top[:, None]), 1))


@triton.jit
def column_lse(tile):
    top = tl.max(tile, 0)
    return top + tl.log(tl.sum(tl.exp(tile - top[None, :]), 0))


@triton.jit
def row_softmax(tile):
    top = tl.max(tile, 1)
    weights = tl.exp(tile - top[:, None])
    return weights / tl.sum(weights, 1)[:, None]


@triton.jit
def sweep(s, log_a, log_m, g, column_ok):
    """The next potential of the pivots: rows to their masses, then columns to theirs."""
    f = row_lse(s + g[None, :])
    lse = column_lse(s + (log_a - f)[:, None])
    return tl.where(column_ok, log_m - lse, 0.0)


@triton.jit
def reverse_sweep(s, log_a, log_m, g, g_next, gradient):
    """Gradient of the scores through one sweep, and what each token's log mass loses.

    With `P = softmax_j(s + g)` and `W = a P / Σ_i a P`, a sweep is `g' = g + log m − log Σ_i a P`; for the gradient
    `y` of `g'` and `h = W y`: that of the scores is `P h − W y`, that of `log a` is `−h`, that of `g` is `Pᵀ h`.
    """
    t = s + g[None, :]
    f = row_lse(t)
    p = tl.exp(t - f[:, None])
    moved = tl.exp(s + (log_a - f)[:, None] + (g_next - log_m)[None, :]) * gradient[None, :]
    h = tl.sum(moved, 1)
    forwarded = p * h[:, None]
    return forwarded - moved, h, tl.sum(forwarded, 0)
