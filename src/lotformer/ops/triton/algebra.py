# mypy: disable-error-code="no-untyped-def"
"""The r×r side of the exact solver inside a kernel; the formulas are those of `lotformer.ops.newton`."""

from __future__ import annotations

import triton
import triton.language as tl

from .. import newton
from .tiles import NEGATIVE, row_softmax

_START_RANGE = tl.constexpr(newton.START_RANGE)
_PACE = tl.constexpr(newton.PACE)
_SETTLED = tl.constexpr(newton.SETTLED)
_LARGE_STEP = tl.constexpr(newton.LARGE_STEP)
_BOLDNESS = tl.constexpr(newton.BOLDNESS)
_STALLED_BELOW = tl.constexpr(1e-4)
_RIDGE = tl.constexpr(3e-6)
_GRADIENT_RIDGE = tl.constexpr(1e-6)
_TINY = tl.constexpr(1.1754944e-38)
_HUGE = tl.constexpr(1e38)


@triton.jit
def column_range(x, column_ok):
    return tl.max(tl.where(column_ok, x, NEGATIVE), 0) - tl.min(tl.where(column_ok, x, _HUGE), 0)


@triton.jit
def off_diagonal(edges, columns, column_ok):
    keep = (columns[:, None] != columns[None, :]) & column_ok[:, None] & column_ok[None, :]
    return tl.where(keep, edges, 0.0)


@triton.jit
def inverse(edges, b, columns, column_ok, rank, ridge):
    """Inverse of `D^-½ (H + b bᵀ) D^-½ + ridge`, and `D^-½`; `H` the Laplacian of `edges`, `D = Diag(b)`.

    By the sweep operator: rank steps, each a rank-one update of the whole symmetric matrix. A pivot that is not
    positive means the matrix is singular in fp32: then the identity is returned, which makes a Sinkhorn step.
    """
    weight = tl.where(column_ok, 1.0 / tl.sqrt(tl.maximum(b, 1e-30)), 0.0)
    diagonal = columns[:, None] == columns[None, :]
    full = tl.where(diagonal, tl.sum(edges, 1)[:, None], -edges) + b[:, None] * b[None, :]
    matrix = full * (weight[:, None] * weight[None, :]) + tl.where(diagonal, ridge, 0.0)
    matrix = tl.where(diagonal & (column_ok[:, None] == 0), 1.0, matrix)
    smallest = 1.0
    for k in range(rank):
        at_column = columns[None, :] == k
        at_row = columns[:, None] == k
        column = tl.sum(tl.where(at_column, matrix, 0.0), 1)
        row = tl.sum(tl.where(at_row, matrix, 0.0), 0)
        pivot = tl.sum(tl.where(columns == k, row, 0.0), 0)
        smallest = tl.minimum(smallest, tl.where(pivot > 0, pivot, -1.0))
        scale = 1.0 / tl.where(pivot > 0, pivot, 1.0)
        updated = matrix - (column * scale)[:, None] * row[None, :]
        updated = tl.where(at_row, (row * scale)[None, :], updated)
        updated = tl.where(at_column, (column * scale)[:, None], updated)
        matrix = tl.where(at_row & at_column, -scale, updated)
    return tl.where(smallest > 0, -matrix, tl.where(diagonal, 1.0, 0.0)), weight


@triton.jit
def apply_inverse(matrix, weight, side):
    return weight * tl.sum(matrix * (weight * side)[None, :], 1)


@triton.jit
def implicit_solve(edges, b, side, columns, column_ok, rank):
    """`H⁺ side` for the gradient, refined once: the ridge and the inverse in fp32 would lose digits at small ε."""
    edges = off_diagonal(edges, columns, column_ok)
    matrix, weight = inverse(edges, b, columns, column_ok, rank, _GRADIENT_RIDGE)
    y = apply_inverse(matrix, weight, side)
    product = tl.sum(edges * (y[:, None] - y[None, :]), 1) + b * tl.sum(b * y, 0)
    return tl.where(column_ok, y + apply_inverse(matrix, weight, side - product), 0.0)


@triton.jit
def first_guess(log_m, spread, mean_score, column_ok):
    """The start of the path: a β at which nothing underflows, and the potential that is exact to first order there."""
    beta = tl.minimum(1.0 / tl.maximum(spread / _START_RANGE, 1e-6), 1.0)
    return beta, tl.where(column_ok, log_m - beta * mean_score, 0.0)


@triton.jit
def score_spread(s, a, column_ok):
    """`Σ_i a_i range_j s_ij`."""
    lowest = tl.min(tl.where(column_ok[None, :], s, _HUGE), 1)
    return tl.sum(a * (tl.max(s, 1) - lowest), 0)


@triton.jit
def look(edges, s, a, g, beta, PRECISION: tl.constexpr):
    """The part of a block of tokens at `(g, β)`: adds its `PᵀAP` to `edges`, returns its `b = Pᵀa` and `∂b/∂β` too."""
    p = row_softmax(beta * s + g[None, :])
    weighted = a[:, None] * p
    drift = tl.sum(weighted * (s - tl.sum(p * s, 1)[:, None]), 0)
    return tl.dot(tl.trans(weighted), p, edges, input_precision=PRECISION), tl.sum(weighted, 0), drift


@triton.jit
def log_residual(b, log_m, column_ok):
    return tl.where(column_ok, tl.log(tl.maximum(b, _TINY)) - log_m, 0.0)


@triton.jit
def advance(edges, b, drift, log_m, g, beta, error, columns, column_ok, rank):
    """One predictor–corrector step; returns the next `(g, β)`."""
    m = tl.where(column_ok, tl.exp(log_m), 0.0)
    edges = off_diagonal(edges, columns, column_ok)
    matrix, weight = inverse(edges, b, columns, column_ok, rank, _RIDGE)
    excess = b - m
    plain = -apply_inverse(matrix, weight, excess)
    log_excess = b * log_residual(b, log_m, column_ok)
    logarithmic = -apply_inverse(matrix, weight, log_excess)
    tangent = -apply_inverse(matrix, weight, drift)
    descends = tl.sum(logarithmic * excess, 0) < 0
    corrector = tl.where(descends, logarithmic, plain)
    reach = column_range(corrector, column_ok)
    gain = -tl.sum(excess * corrector, 0)
    # dᵀHd out of (H + b bᵀ + ridge·D) d = −side: the matrix need not be kept
    side = tl.where(descends, log_excess, excess)
    level = tl.sum(b * corrector, 0)
    curvature = -tl.sum(corrector * (side + corrector * b * _RIDGE), 0) - level * level
    ratio = tl.minimum(tl.maximum(gain / tl.maximum(curvature, 1e-30), 1.0), 1e6)
    scaled = tl.maximum(tl.where(reach < _LARGE_STEP, _BOLDNESS, 1.0) * reach, 1e-6)
    length = tl.where(reach < 1, 1.0, tl.minimum(tl.log(1.0 + ratio * scaled) / scaled, 1.0))
    settled = (error < _SETTLED) & (reach < _LARGE_STEP)
    next_beta = tl.where(settled, tl.minimum(beta * _PACE, 1.0), beta)
    g = tl.where(column_ok, g + length * corrector + (next_beta - beta) * tangent, 0.0)
    return g, next_beta


@triton.jit
def polish(edges, b, log_m, g, columns, column_ok, rank):
    """A last full Newton step at β = 1, taken only from near the solution."""
    edges = off_diagonal(edges, columns, column_ok)
    matrix, weight = inverse(edges, b, columns, column_ok, rank, _GRADIENT_RIDGE)
    step = apply_inverse(matrix, weight, b - tl.where(column_ok, tl.exp(log_m), 0.0))
    near = column_range(step, column_ok) < 0.5
    return g - tl.where(near, step, 0.0)


@triton.jit
def record(beta, error, g, best, best_error):
    """Keep the best potential seen at β = 1; says also whether rounding decides from here on."""
    improved = (beta >= 1) & (error < best_error)
    stalled = (beta >= 1) & (error >= best_error) & (best_error < _STALLED_BELOW)
    return tl.where(improved, g, best), tl.where(improved, error, best_error), stalled
