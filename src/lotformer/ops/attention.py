"""LOT attention: the public operator."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import backends
from .checks import check, check_probability
from .convergence import warn_of_a_miss
from .coupling import Coupling
from .problem import Balance, Solve, Solver, Transport, is_traced
from .solution import Solution, coupling_of

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

    Returns:
        `(B, H, N, Dv)` in the dtype of `q`. Rows of padded queries, and samples without keys, are zero.
        A sample does not depend on its batch: bit for bit with one thread, to rounding with several.
        `lotformer.ops.solve_attention` returns its residual and its plans as well.
    """
    if is_causal:
        raise ValueError(CAUSAL_REFUSAL)
    if pivots is None:
        raise TypeError("`pivots`: expected a tensor, got None. Scores are taken by `lot_attention_from_scores`.")
    transport = Transport(q, k, v, pivots, log_masses, query_mask, key_mask, query_masses, key_masses)
    solve = Solve(eps, solver, iters, tol, scale, balance)
    return _solved(transport, solve, dropout_p, backend).out


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
) -> Tensor:
    """`lot_attention` for tokens whose scores with the pivots are known; they are divided by `eps` and nothing else.

    With fixed pivots, scores are linear in the input of a layer: for R < D it is cheaper to project to them than to
    queries and keys.

    Args:
        query_scores: `scale · q zᵀ (B, H, N, R)`. key_scores: `scale · k zᵀ (B, H, M, R)`. v: values `(B, H, M, Dv)`.
        The others are those of `lot_attention`.
    """
    transport = Transport(query_scores, key_scores, v, None, log_masses, query_mask, key_mask, query_masses, key_masses)
    return _solved(transport, Solve(eps, solver, iters, tol, 1.0, balance), dropout_p, backend).out


def solve_attention(transport: Transport, solve: Solve, backend: str | None = None) -> Solution:
    """The output of `lot_attention` and what can be asked about its solve: residual, convergence, plans.

        solution = solve_attention(Transport(q, k, v, pivots, log_masses, key_mask=real), Solve(eps=0.1, iters=20))
        solution.out, solution.residual, solution.converged, solution.coupling()

    Args:
        transport: the tensors of `lot_attention`. With `pivots=None`, q and k are scores; they, too, are multiplied by
            `scale`, so that it has to be 1.0 for those of `lot_attention_from_scores`.
        solve: its options `eps`, `solver`, `iters`, `tol`, `scale` and `balance`.
    """
    return _solved(transport, solve, 0.0, backend)


def _solved(transport: Transport, solve: Solve, dropout_p: float, backend: str | None) -> Solution:
    if dropout_p != 0:
        check_probability("dropout_p", dropout_p)
    check(transport, solve)
    chosen = backends.TRANSPORT.choose(backend, transport, solve)
    q, v = transport.q, transport.v
    if transport.is_empty:
        # nothing to send or nothing to receive: zeros, whatever q holds
        return Solution(q[..., :0] @ q.new_zeros(0, v.shape[3]), transport, solve, chosen.name)
    if dropout_p > 0:
        transport = transport._replace(v=drop_keys(v, dropout_p))
    result = chosen.run(transport, solve)
    exact = solve.solver == "newton" and solve.balance != "none"
    if exact and q.device.type == "cpu" and not is_traced(q):
        warn_of_a_miss(result.residual, solve)
    return Solution(result.out, transport, solve, chosen.name, result)


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
    return couple(transport, Solve(eps, solver, iters, tol, scale, balance), backend)


def couple(transport: Transport, solve: Solve, backend: str | None = None) -> Coupling:
    """The plans behind `solve_attention` with the same arguments; the values are not looked at."""
    check(transport, solve)
    transport = transport._replace(v=transport.k[..., :1])  # backends want some
    chosen = backends.TRANSPORT.choose(backend, transport, solve)
    if chosen is backends.TRANSPORT.reference or transport.is_empty:
        return coupling_of(transport, solve, chosen.name)
    with torch.no_grad():
        potentials = chosen.run(transport, solve).potentials()
    return coupling_of(transport, solve, chosen.name, potentials)


def drop_keys(v: Tensor, p: float) -> Tensor:
    """Values `(B, H, M, Dv)` without those of dropped keys: every row that reads them misses the same entries of A.

    A key is dropped in a head with probability `p`; the others count `1 / (1 - p)` times, which keeps the mean.
    """
    return v * F.dropout(torch.ones_like(v[..., :1]), p)
