"""LOT attention in plain PyTorch: the definition that every kernel is tested against.

    s1 = scale · q zᵀ / eps      (N×R)           s2 = scale · k zᵀ / eps      (M×R)

    query plan  P = softmax_j(s1 + g)            rows sum to 1
        g so that  Σ_i a1_i P_ij = m_j           a1: masses of the queries, m: masses of the pivots
    key plan    W = softmax_i(log a2 + s2 + f)   columns sum to 1
        f so that  Σ_j m_j W_ij = a2_i           a2: masses of the keys

    out = P (Wᵀ v)

A transport plan between tokens and pivots is `Γ_ij = a_i exp(f_i + s_ij + g_j)`. Both solvers below return
a plan whose one marginal is exact by construction and whose other marginal is as good as the solve.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import newton
from .problem import LEAST_LOG_MASS, Problem


def plans(problem: Problem) -> tuple[Tensor, Tensor]:
    """Query plan P `(B, H, N, R)` and key plan W `(B, H, M, R)`; rows of padded tokens are zero."""
    p = problem
    with torch.autocast(p.q.device.type, enabled=False):
        log_m = log_pivot_masses(p)
        query_plan = _query_plan(p, _scores(p, p.q, p.query_mask), query_masses(p), log_m)
        key_plan = _key_plan(p, _scores(p, p.k, p.key_mask), key_masses(p), log_m)
    return query_plan, key_plan


def run(problem: Problem) -> Tensor:
    """The operator: `P (Wᵀ v)` without forming the N×M matrix."""
    query_plan, key_plan = plans(problem)
    return mix(query_plan, key_plan, zero_padding(problem.v, problem.key_mask))


def mix(query_plan: Tensor, key_plan: Tensor, v: Tensor) -> Tensor:
    """`P (Wᵀ v)`, in the plans' precision, returned in the dtype of `v`."""
    with torch.autocast(v.device.type, enabled=False):
        return (query_plan @ (key_plan.mT @ v.to(key_plan.dtype))).to(v.dtype)


def _query_plan(p: Problem, s: Tensor, a: Tensor, log_m: Tensor) -> Tensor:
    log_a, _ = _log_masses(a)
    if p.solver == "newton":
        g = newton.potential(s, log_a.exp(), log_m, tol=p.tol)
    else:
        g = torch.zeros_like(log_m)
        for _ in range(p.iters):
            f = -torch.logsumexp(s + g, -1, keepdim=True)
            g = log_m - torch.logsumexp(log_a[..., None] + s + f, -2, keepdim=True)
    return zero_padding(torch.softmax(s + g, -1), p.query_mask)


def _key_plan(p: Problem, s: Tensor, a: Tensor, log_m: Tensor) -> Tensor:
    log_a, exists = _log_masses(a)
    if p.solver == "newton":
        g = newton.potential(s, log_a.exp(), log_m, tol=p.tol)
        f = -torch.logsumexp(s + g, -1, keepdim=True)
    else:
        f = torch.zeros_like(s[..., :1])
        for _ in range(p.iters):
            g = log_m - torch.logsumexp(log_a[..., None] + s + f, -2, keepdim=True)
            f = -torch.logsumexp(s + g, -1, keepdim=True)
    return torch.softmax(log_a[..., None] + s + f, -2) * exists


def _scores(p: Problem, x: Tensor, mask: Tensor | None) -> Tensor:
    dtype = solve_dtype(x)
    temperature = p.scale / p.eps
    if isinstance(temperature, Tensor):
        temperature = temperature.to(dtype).expand(p.pivots.shape[-3])[:, None, None]
    z = p.pivots.to(dtype) * temperature
    return zero_padding(x, mask).to(dtype) @ z.mT


def solve_dtype(x: Tensor) -> torch.dtype:
    """Scores, potentials and sums are fp32, or fp64 for fp64 inputs, whatever the inputs or autocast say."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def log_pivot_masses(p: Problem) -> Tensor:
    """Log masses of the pivots `(H, 1, R)`, normalised, so that rounding in the input cannot unbalance a plan."""
    return p.log_masses.clamp_min(LEAST_LOG_MASS[p.solver]).to(solve_dtype(p.q)).log_softmax(-1)[:, None, :]


def query_masses(p: Problem) -> Tensor:
    """Masses of the queries in force, `(B, 1 or H, N)`; zero on padding, sum 1 (0 for an empty sample)."""
    return _token_masses(p.query_masses, p.query_mask, p.q)


def key_masses(p: Problem) -> Tensor:
    """Masses of the keys in force, `(B, 1 or H, M)`; zero on padding, sum 1 (0 for an empty sample)."""
    return _token_masses(p.key_masses, p.key_mask, p.k)


def _token_masses(masses: Tensor | None, mask: Tensor | None, x: Tensor) -> Tensor:
    batch, _, length, _ = x.shape
    dtype = solve_dtype(x)
    if masses is None:
        a = torch.ones(batch, 1, length, dtype=dtype, device=x.device)
    else:
        a = masses.to(dtype) if masses.dim() == 3 else masses.to(dtype)[:, None]
    if mask is not None:
        a = a.masked_fill(~mask[:, None, :], 0.0)
    total = a.sum(-1, keepdim=True)
    return a / torch.where(total > 0, total, 1.0)


def _log_masses(a: Tensor) -> tuple[Tensor, Tensor]:
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
