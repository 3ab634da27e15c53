"""Pivots of every sample's own, for kernels that know one set per head: samples become heads."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from . import reference
from .problem import Problem


def folding(run: Callable[[Problem], Tensor]) -> Callable[[Problem], Tensor]:
    """A backend's `run` that also takes pivots `(B, H, R, D)`.

    It copies the tokens, and padded queries cost as much as real ones.
    """

    def run_any(problem: Problem) -> Tensor:
        if problem.pivots.dim() == 3:
            return run(problem)
        out = run(_folded(problem)).reshape(*problem.q.shape[:3], problem.v.shape[3])
        return reference.zero_padding(out, problem.query_mask)

    return run_any


def _folded(p: Problem) -> Problem:
    """The same problem as one sample with B·H heads.

    Masks belong to samples, so they become masses here: a key without mass is treated like padding, and what a query
    without mass receives is cleared afterwards.
    """
    batch, heads = p.q.shape[:2]

    def fold(x: Tensor) -> Tensor:
        return x.reshape(1, batch * heads, *x.shape[2:])

    def masses(a: Tensor) -> Tensor:
        return fold(a.expand(batch, heads, -1))

    queries_differ = p.query_mask is not None or p.query_masses is not None
    keys_differ = p.key_mask is not None or p.key_masses is not None
    return p._replace(
        q=fold(reference.zero_padding(p.q, p.query_mask)),
        k=fold(p.k),
        v=fold(p.v),
        pivots=p.pivots.flatten(0, 1),
        log_masses=p.log_masses.repeat(batch, 1),
        eps=p.eps.expand(heads).repeat(batch) if isinstance(p.eps, Tensor) else p.eps,
        query_mask=None,
        key_mask=None,
        query_masses=masses(reference.query_masses(p)) if queries_differ else None,
        key_masses=masses(reference.key_masses(p)) if keys_differ else None,
    )
