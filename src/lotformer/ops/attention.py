"""LOT attention: the public operator."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from . import backends, reference
from .checks import check, check_probability
from .convergence import warn_of_a_miss
from .coupling import Coupling
from .problem import Balance, Solve, Solver, Transport, is_traced

CAUSAL_REFUSAL = (
    "LOT attention cannot be causal: in a lower-triangular doubly stochastic matrix the last column has one "
    "non-zero entry, so A[n,n] = 1, which empties the rest of row n; by induction A is the identity. "
    "Use it where tokens may look both ways (encoders, cross-attention)."
)


def lot_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pivots: Tensor,
    log_masses: Tensor,
    *,
    eps: float | Tensor = 1.0,
    solver: Solver = "sinkhorn",
    iters: int = 5,
    tol: float | None = 1e-6,
    scale: float | None = None,
    balance: Balance = "both",
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    query_masses: Tensor | None = None,
    key_masses: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    backend: str | None = None,
    return_residual: bool = False,
) -> Tensor:
    """Attention by two entropic transport plans glued at a small pivot measure: linear in N and M.

    `A = P Wᵀ` has rank at most R, rows that sum to one in every precision, and columns that sum to `N / M` as
    far as the solve has converged; `out = A v` is computed without forming it. The formulas are in
    `lotformer.ops.reference`.

    Args:
        q: queries `(B, H, N, D)`. k: keys `(B, H, M, D)`. v: values `(B, H, M, Dv)`.
        pivots: `(H, R, D)`, or `(B, H, R, D)` if samples have pivots of their own.
        log_masses: logarithms of the pivots' masses `(H, R)`, normalised.
        eps: entropic regularisation, a number above 0 or a learnable tensor `(H,)`. Small is sharp.
        solver: "sinkhorn" runs `iters` full sweeps and the closing half-step, and differentiates through them;
            "newton" solves to `tol` and differentiates implicitly, once: it has no second derivative.
        tol: bound on the relative error of the column sums for "newton" (fp32 reaches about 1e-6 at ε = 1 and
            1e-5 at ε = 0.01). None, and any compiled or vmapped call, runs a fixed number of passes instead.
        scale: factor of the scores, `D^-1/2` by default.
        balance: which marginals are imposed beside unit rows. "both": the pivots' masses on the queries and the keys'
            masses on the keys, as in the paper. "keys": the keys' alone, which keeps A doubly stochastic for half the
            work; the pivots' masses become a prior. "none": neither; A is row-stochastic and nothing is solved.
        query_mask, key_mask: boolean `(B, N)`, `(B, M)`, True = a real token. Padding has zero mass.
        query_masses, key_masses: masses of the tokens, `(B, N)` or `(B, H, N)` (M for keys), at least 0, sum 1
            over real tokens; uniform by default. Columns of A then sum to `N · key_masses`. A key of zero mass
            is treated like padding (and gets no gradient of its mass).
        dropout_p: probability of dropping a key: the same entries of A for every query of a head, so that A
            need not be formed.
        backend: None picks the fastest that can run the problem; a name forces it or raises.
        return_residual: return `(out, residual)`, with the residual `ρ (B, H)` that the backend's solve has reached:
            a column of A misses its sum by at most `2ρ / (1 - ρ)` of it, if ρ < 1.

    Returns:
        `(B, H, N, Dv)` in the dtype of `q`. Rows of padded queries, and samples without keys, are zero.
        A sample does not depend on its batch: bit for bit with one thread, to rounding with several.
    """
    if is_causal:
        raise ValueError(CAUSAL_REFUSAL)
    if pivots is None:
        raise TypeError("`pivots`: expected a tensor, got None. Scores are taken by `lot_attention_from_scores`.")
    transport = Transport(q, k, v, pivots, log_masses, query_mask, key_mask, query_masses, key_masses)
    solve = Solve(eps, solver, iters, tol, scale, balance)
    return _attend(transport, solve, dropout_p, backend, return_residual)


def lot_attention_from_scores(
    query_scores: Tensor,
    key_scores: Tensor,
    v: Tensor,
    log_masses: Tensor,
    *,
    eps: float | Tensor = 1.0,
    solver: Solver = "sinkhorn",
    iters: int = 5,
    tol: float | None = 1e-6,
    balance: Balance = "both",
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    query_masses: Tensor | None = None,
    key_masses: Tensor | None = None,
    dropout_p: float = 0.0,
    backend: str | None = None,
    return_residual: bool = False,
) -> Tensor:
    """`lot_attention` for tokens whose scores with the pivots are known; they are divided by `eps` and nothing else.

    With fixed pivots, scores are linear in the input of a layer: for R < D it is cheaper to project to them than to
    queries and keys.

    Args:
        query_scores: `scale · q zᵀ (B, H, N, R)`. key_scores: `scale · k zᵀ (B, H, M, R)`. v: values `(B, H, M, Dv)`.
        The others are those of `lot_attention`.
    """
    transport = Transport(query_scores, key_scores, v, None, log_masses, query_mask, key_mask, query_masses, key_masses)
    return _attend(transport, Solve(eps, solver, iters, tol, 1.0, balance), dropout_p, backend, return_residual)


def _attend(transport: Transport, solve: Solve, dropout_p: float, backend: str | None, return_residual: bool) -> Tensor:
    check_probability("dropout_p", dropout_p)
    check(transport, solve)
    chosen = backends.TRANSPORT.choose(backend, transport, solve)
    q, k, v = transport.q, transport.k, transport.v
    if q.shape[2] == 0 or k.shape[2] == 0:
        out = q[..., :0] @ q.new_zeros(0, v.shape[3])  # nothing to send or nothing to receive: zeros, whatever q holds
        return cast(Tensor, (out, _no_residual(q))) if return_residual else out
    if dropout_p > 0:
        transport = transport._replace(v=drop_keys(v, dropout_p))
    result = chosen.run(transport, solve)
    exact = solve.solver == "newton" and solve.balance != "none"
    if exact and q.device.type == "cpu" and not is_traced(q):
        warn_of_a_miss(result.residual, solve)
    # to a type checker a tensor unpacks like a pair does; overloads would state every argument twice more
    return cast(Tensor, (result.out, result.residual())) if return_residual else result.out


def coupling(
    q: Tensor,
    k: Tensor,
    pivots: Tensor,
    log_masses: Tensor,
    *,
    eps: float | Tensor = 1.0,
    solver: Solver = "sinkhorn",
    iters: int = 5,
    tol: float | None = 1e-6,
    scale: float | None = None,
    balance: Balance = "both",
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    query_masses: Tensor | None = None,
    key_masses: Tensor | None = None,
    backend: str | None = None,
) -> Coupling:
    """The two plans behind `lot_attention` with the same arguments, to look at and to apply.

    They are the plans of the backend that `lot_attention` would run, made from the potentials it reaches: what they
    miss is what it misses. `backend="reference"` gives plans that carry gradients.
    """
    transport = Transport(q, k, k, pivots, log_masses, query_mask, key_mask, query_masses, key_masses)
    solve = Solve(eps, solver, iters, tol, scale, balance)
    check(transport, solve)
    transport = transport._replace(v=k[..., :1])  # there are no values, and backends want some
    chosen = backends.TRANSPORT.choose(backend, transport, solve)
    if chosen is backends.TRANSPORT.reference or q.shape[2] == 0 or k.shape[2] == 0:
        query_plan, key_plan = reference.plans(transport, solve)
    else:
        with torch.no_grad():
            query_plan, key_plan = reference.plans(transport, solve, chosen.run(transport, solve).potentials())
    sent_by, received_by = reference.query_masses(transport), reference.key_masses(transport)
    masses = reference.log_pivot_masses(transport, solve)[:, 0].exp()
    if balance != "both":
        masses = (sent_by[..., None] * query_plan).sum(-2)
    if balance == "none":
        received_by = (key_plan @ masses[..., None])[..., 0]
    return Coupling(
        query_plan=query_plan,
        key_plan=key_plan,
        masses=masses,
        query_masses=sent_by,
        key_masses=received_by,
        key_mask=key_mask,
        backend=chosen.name,
    )


def drop_keys(v: Tensor, p: float) -> Tensor:
    """Values `(B, H, M, Dv)` without those of dropped keys: every row that reads them misses the same entries of A.

    A key is dropped in a head with probability `p`; the others count `1 / (1 - p)` times, which keeps the mean.
    """
    return v * F.dropout(torch.ones_like(v[..., :1]), p)


def _no_residual(q: Tensor) -> Tensor:
    return q.new_zeros(q.shape[:2], dtype=reference.solve_dtype(q))
