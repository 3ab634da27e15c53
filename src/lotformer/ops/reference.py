"""LOT attention in plain PyTorch: the definition that every kernel is tested against.

    s1 = scale · q zᵀ / eps      (N×R)           s2 = scale · k zᵀ / eps      (M×R)

    query plan  P = softmax_j(s1 + g)            rows sum to 1
        g so that  Σ_i a1_i P_ij = m_j           a1: masses of the queries, m: masses of the pivots
    key plan    W = softmax_i(log a2 + s2 + f)   columns sum to 1
        f so that  Σ_j m_j W_ij = a2_i           a2: masses of the keys

    out = P (Wᵀ v)

That is `balance="both"`, the paper's. Only the second solve makes A doubly stochastic, so it can be had for half the
work, or given up:

    "keys":  g = log m, no solve; f so that Σ_j m'_j W_ij = a2_i with m' = Pᵀ a1, what the queries have sent.
             Columns of A still get their masses: Σ_i a1_i A_ik = Σ_j m'_j W_kj = a2_k. m is a prior.
    "none":  g = log m and f = 0. Rows sum to 1; a key receives the implied mass Σ_j m'_j W_kj.

A transport plan between tokens and pivots is `Γ_ij = a_i exp(f_i + s_ij + g_j)`. Both solvers find a potential g of the
pivots, to which `f = -LSE_j(s + g)` belongs. Each plan has one marginal that is exact by construction and another that
is as good as the solve.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from . import newton
from .precision import no_autocast
from .problem import LEAST_LOG_MASS, Potentials, Result, Solve, Transport


class _Side(NamedTuple):
    """The tokens of one side as the solvers see them."""

    scores: Tensor  # s, (B, H, tokens, R)
    log_a: Tensor  # (B, 1 or H, tokens); -inf where there is no mass
    exists: Tensor  # whether the sample has any mass, (B, 1 or H, 1, 1)
    log_m: Tensor  # (H, 1, R), or (B, H, 1, R) if it is what the queries have sent


class _Solution(NamedTuple):
    """Both sides and their potentials `g (…, 1, R)`."""

    queries: _Side
    keys: _Side
    query_g: Tensor
    key_g: Tensor


def run(transport: Transport, solve: Solve) -> Result:
    """The operator: `P (Wᵀ v)` without forming the N×M matrix."""
    t = transport
    with _as_it_is(t.q, solve):
        solution = _solution(t, solve)
        query_plan, key_plan = _plans(solution, t, solve)
    # rows of padding are zeros already: filling them once more keeps what comes back there out of the gradients
    out = zero_padding(mix(query_plan, key_plan, zero_padding(t.v, t.key_mask)), t.query_mask)
    return Result(
        out,
        residual=lambda: _residual(solution, solve).to(solve_dtype(t.q)),
        potentials=lambda: (_per_head(solution.query_g, t), _per_head(solution.key_g, t)),
    )


def plans(transport: Transport, solve: Solve, potentials: Potentials | None = None) -> tuple[Tensor, Tensor]:
    """Query plan P `(B, H, N, R)` and key plan W `(B, H, M, R)`; rows of padded tokens are zero.

    Those that `run` uses, or those of the given potentials.
    """
    with _as_it_is(transport.q, solve):
        query_plan, key_plan = _plans(_solution(transport, solve, potentials), transport, solve)
    dtype = solve_dtype(transport.q)
    return query_plan.to(dtype), key_plan.to(dtype)


def residual(transport: Transport, solve: Solve, potentials: Potentials) -> Tensor:
    """The residual `ρ (B, H)`: the distance of the two plans of the potentials from balance.

    `ρ = max_j |b_j / m_j - 1|` over the pivots of the sides that are solved, where b are the masses that
    `softmax_j(s + g)` sends to the pivots. Below 1, it bounds what a key's column of A misses of its sum: at most
    `2ρ / (1 - ρ)` of it. Pivots without a mass to speak of are left out; a sample without queries or without keys has a
    residual of 0, and so has every sample if nothing is imposed.
    """
    with _as_it_is(transport.q, solve):
        return _residual(_solution(transport, solve, potentials), solve).to(solve_dtype(transport.q))


def mix(query_plan: Tensor, key_plan: Tensor, v: Tensor) -> Tensor:
    """`P (Wᵀ v)`, in the plans' precision, returned in the dtype of `v`."""
    with no_autocast(v.device.type):
        return (query_plan @ (key_plan.mT @ v.to(key_plan.dtype))).to(v.dtype)


# The two half-steps of a sweep. `_pivot_potential` alone sums over the tokens: a sequence split over processes would
# add up its R numbers there (and `Wᵀ v` in `mix`), and nothing else would change.


def _token_potential(side: _Side, g: Tensor) -> Tensor:
    """`f (…, tokens, 1)` that makes rows of the plan sum to their masses."""
    return -torch.logsumexp(side.scores + g, -1, keepdim=True)


def _pivot_potential(side: _Side, f: Tensor) -> Tensor:
    """`g (…, 1, R)` that makes columns of the plan sum to the masses of the pivots."""
    return side.log_m - torch.logsumexp(side.log_a[..., None] + side.scores + f, -2, keepdim=True)


def _solution(t: Transport, s: Solve, potentials: Potentials | None = None) -> _Solution:
    queries, keys = _query_side(t, s), _key_side(t, s)
    if potentials is not None:
        query_g, key_g = (g[..., None, :] for g in potentials)
    else:
        query_g = _query_potential(queries, s) if s.balance == "both" else queries.log_m
    if s.balance != "both":
        keys = keys._replace(log_m=_log_sent(queries, query_g, s))
    if potentials is None:
        key_g = torch.zeros_like(keys.log_m) if s.balance == "none" else _key_potential(keys, s)
    return _Solution(queries, keys, query_g, key_g)


def _log_sent(queries: _Side, g: Tensor, solve: Solve) -> Tensor:
    """`log m' (B, H, 1, R)`, the masses that the queries send to the pivots; light ones count as `LEAST_LOG_MASS`."""
    log_plan = torch.log_softmax(queries.scores + g, -1)
    log_sent = torch.logsumexp(queries.log_a[..., None] + log_plan, -2, keepdim=True)
    return log_sent.clamp_min(LEAST_LOG_MASS[solve.solver]).log_softmax(-1)


def _query_potential(side: _Side, solve: Solve) -> Tensor:
    if solve.solver == "newton":
        return newton.potential(side.scores, side.log_a.exp(), side.log_m, tol=solve.tol)
    g = torch.zeros_like(side.log_m)
    for _ in range(solve.iters):
        g = _pivot_potential(side, _token_potential(side, g))
    return g


def _key_potential(side: _Side, solve: Solve) -> Tensor:
    if solve.solver == "newton":
        return newton.potential(side.scores, side.log_a.exp(), side.log_m, tol=solve.tol)
    g = _pivot_potential(side, torch.zeros_like(side.scores[..., :1]))
    for _ in range(solve.iters - 1):
        g = _pivot_potential(side, _token_potential(side, g))
    return g


def _plans(solution: _Solution, t: Transport, solve: Solve) -> tuple[Tensor, Tensor]:
    queries, keys, query_g, key_g = solution
    query_plan = zero_padding(torch.softmax(queries.scores + query_g, -1), t.query_mask)
    f = 0.0 if solve.balance == "none" else _token_potential(keys, key_g)
    return query_plan, torch.softmax(keys.log_a[..., None] + keys.scores + f, -2) * keys.exists


def _per_head(g: Tensor, t: Transport) -> Tensor:
    """`(…, 1, R)` as `(B, H, R)`."""
    return g.detach()[..., 0, :].expand(*t.q.shape[:2], -1)


@torch.no_grad()
def _residual(solution: _Solution, solve: Solve) -> Tensor:
    queries, keys, query_g, key_g = solution
    error = torch.zeros_like(keys.scores[..., :1, :]) if solve.balance == "none" else _column_errors(keys, key_g)
    if solve.balance == "both":
        error = torch.maximum(error, _column_errors(queries, query_g))
    counts = queries.exists & keys.exists & (keys.log_m > LEAST_LOG_MASS["newton"])
    return torch.where(counts, error, 0.0).amax((-2, -1))


def _column_errors(side: _Side, g: Tensor) -> Tensor:
    """`|b / m - 1|`, `(…, 1, R)`: one more sweep would move g by log(m / b)."""
    return torch.expm1(g - _pivot_potential(side, _token_potential(side, g))).abs()


def _query_side(t: Transport, s: Solve) -> _Side:
    return _side(t, s, t.q, t.query_mask, query_masses(t))


def _key_side(t: Transport, s: Solve) -> _Side:
    return _side(t, s, t.k, t.key_mask, key_masses(t))


def _side(t: Transport, s: Solve, x: Tensor, mask: Tensor | None, a: Tensor) -> _Side:
    dtype = _precision(x, s)
    temperature = s.temperature(x.shape[-1])
    if isinstance(temperature, Tensor):
        temperature = temperature.to(dtype).expand(x.shape[1])[:, None, None]
    x = zero_padding(x, mask).to(dtype)
    scores = x * temperature if t.pivots is None else x @ (t.pivots.to(dtype) * temperature).mT
    log_a, exists = log_token_masses(_normalised(a.to(dtype)))
    return _Side(scores, log_a, exists, log_pivot_masses(t, s, dtype))


def _precision(x: Tensor, solve: Solve) -> torch.dtype:
    return newton.precision(x) if solve.solver == "newton" else solve_dtype(x)


def _as_it_is(x: Tensor, solve: Solve) -> AbstractContextManager[None]:
    """A context in which autocast does not change the precision of the solve.

    It leaves fp64 alone. To turn it off nevertheless would do harm: what `torch.export` makes of a loop with autocast
    off cannot be saved.
    """
    return nullcontext() if _precision(x, solve) == torch.float64 else no_autocast(x.device.type)


def solve_dtype(x: Tensor) -> torch.dtype:
    """Scores, potentials and sums are fp32, or fp64 for fp64 inputs, whatever the inputs or autocast say.

    The exact solver has `newton.precision`.
    """
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def log_pivot_masses(t: Transport, s: Solve, dtype: torch.dtype | None = None) -> Tensor:
    """Log masses of the pivots `(H, 1, R)`, normalised, so that rounding in the input cannot unbalance a plan."""
    return t.log_masses.clamp_min(LEAST_LOG_MASS[s.solver]).to(dtype or solve_dtype(t.q)).log_softmax(-1)[:, None, :]


def query_masses(t: Transport) -> Tensor:
    """Masses of the queries in force, `(B, 1 or H, N)`; zero on padding, sum 1 (0 for an empty sample)."""
    return _token_masses(t.query_masses, t.query_mask, t.q)


def key_masses(t: Transport) -> Tensor:
    """Masses of the keys in force, `(B, 1 or H, M)`; zero on padding, sum 1 (0 for an empty sample)."""
    return _token_masses(t.key_masses, t.key_mask, t.k)


def _token_masses(masses: Tensor | None, mask: Tensor | None, x: Tensor) -> Tensor:
    batch, _, length, _ = x.shape
    dtype = solve_dtype(x)
    if masses is None:
        a = torch.ones(batch, 1, length, dtype=dtype, device=x.device)
    else:
        a = masses.to(dtype) if masses.dim() == 3 else masses.to(dtype)[:, None]
    if mask is not None:
        a = a.masked_fill(~mask[:, None, :], 0.0)
    return _normalised(a)


def _normalised(a: Tensor) -> Tensor:
    total = a.sum(-1, keepdim=True)
    return a / torch.where(total > 0, total, 1.0)


def log_token_masses(a: Tensor) -> tuple[Tensor, Tensor]:
    """`log a` (-inf where there is no mass) and whether the sample has any mass, `(B, 1 or H, 1, 1)`.

    A sample without mass is solved as if its (zeroed) tokens were real, which is finite, and then dropped.
    """
    exists = a.sum(-1, keepdim=True) > 0
    a = torch.where(exists, a, torch.ones_like(a) / a.shape[-1])
    log_a = torch.where(a > 0, torch.where(a > 0, a, 1.0).log(), -torch.inf)
    return log_a, exists[..., None]


def zero_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """`x (B, H, N, D)` with zeros where the mask `(B, N)` is False."""
    return x if mask is None else x.masked_fill(~mask[:, None, :, None], 0.0)
