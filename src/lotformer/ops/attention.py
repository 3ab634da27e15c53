"""LOT attention: the public operator."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import backends, reference
from .coupling import Coupling
from .problem import Problem, Solver, check, check_pivot_masses

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
        query_mask, key_mask: boolean `(B, N)`, `(B, M)`, True = a real token. Padding has zero mass.
        query_masses, key_masses: masses of the tokens, `(B, N)` or `(B, H, N)` (M for keys), at least 0, sum 1
            over real tokens; uniform by default. Columns of A then sum to `N · key_masses`. A key of zero mass
            is treated like padding (and gets no gradient of its mass).
        dropout_p: probability of dropping a key: the same entries of A for every query of a head, so that A
            need not be formed.
        backend: None picks the fastest that can run the problem; a name forces it or raises.

    Returns:
        `(B, H, N, Dv)` in the dtype of `q`. Rows of padded queries, and samples without keys, are zero.
    """
    if is_causal:
        raise ValueError(CAUSAL_REFUSAL)
    if not 0 <= dropout_p < 1:
        raise ValueError(f"`dropout_p`: expected a probability in [0, 1), got {dropout_p}.")
    problem = Problem(
        q, k, v, pivots, log_masses, eps, solver, iters, tol,
        q.shape[-1] ** -0.5 if scale is None else scale, query_mask, key_mask, query_masses, key_masses,
    )  # fmt: skip
    check(problem)
    chosen = backends.choose(problem, backend)
    empty = q.shape[2] == 0 or k.shape[2] == 0
    if empty or not chosen.checks_pivot_masses:
        check_pivot_masses(problem)
    if empty:
        return q[..., :0] @ q.new_zeros(0, v.shape[3])  # nothing to send or nothing to receive: zeros, whatever q holds
    if dropout_p > 0:
        kept = F.dropout(torch.ones_like(v[..., :1]), dropout_p)
        problem = problem._replace(v=v * kept)
    return chosen.run(problem)


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
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    query_masses: Tensor | None = None,
    key_masses: Tensor | None = None,
) -> Coupling:
    """The two plans behind `lot_attention` with the same arguments, to look at and to apply."""
    problem = Problem(
        q, k, k[..., :0], pivots, log_masses, eps, solver, iters, tol,
        q.shape[-1] ** -0.5 if scale is None else scale, query_mask, key_mask, query_masses, key_masses,
    )  # fmt: skip
    check(problem)
    check_pivot_masses(problem)
    query_plan, key_plan = reference.plans(problem)
    return Coupling(
        query_plan=query_plan,
        key_plan=key_plan,
        masses=reference.log_pivot_masses(problem)[:, 0].exp(),
        query_masses=reference.query_masses(problem),
        key_masses=reference.key_masses(problem),
        key_mask=key_mask,
    )
