"""Pivots of every sample's own, for kernels that know one set per head: samples become heads."""

from __future__ import annotations

from torch import Tensor

from . import reference
from .problem import Potentials, Result, Run, Solve, Transport


def folding(run: Run) -> Run:
    """A backend's `run` that also takes pivots `(B, H, R, D)`.

    It copies the tokens, and padded queries cost as much as real ones.
    """

    def run_any(transport: Transport, solve: Solve) -> Result:
        if transport.pivots is None or transport.pivots.dim() == 3:
            return run(transport, solve)
        batch, heads = transport.q.shape[:2]

        def unfold(x: Tensor) -> Tensor:
            return x.reshape(batch, heads, *x.shape[2:])

        def potentials() -> Potentials:
            query_g, key_g = folded.potentials()
            return unfold(query_g), unfold(key_g)

        folded = run(*_folded(transport, solve))
        out = reference.zero_padding(unfold(folded.out), transport.query_mask)
        return Result(out, lambda: unfold(folded.residual()), potentials)

    return run_any


def _folded(t: Transport, s: Solve) -> tuple[Transport, Solve]:
    """The same problem as one sample with B·H heads.

    Masks belong to samples, so they become masses here: a key without mass is treated like padding, and what a query
    without mass receives is cleared afterwards.
    """
    batch, heads = t.q.shape[:2]

    def fold(x: Tensor) -> Tensor:
        return x.reshape(1, batch * heads, *x.shape[2:])

    def masses(a: Tensor) -> Tensor:
        return fold(a.expand(batch, heads, -1))

    queries_differ = t.query_mask is not None or t.query_masses is not None
    keys_differ = t.key_mask is not None or t.key_masses is not None
    folded = Transport(
        q=fold(reference.zero_padding(t.q, t.query_mask)),
        k=fold(t.k),
        v=fold(t.v),
        pivots=None if t.pivots is None else t.pivots.flatten(0, 1),
        log_masses=t.log_masses.repeat(batch, 1),
        query_masses=masses(reference.query_masses(t)) if queries_differ else None,
        key_masses=masses(reference.key_masses(t)) if keys_differ else None,
    )
    return folded, s._replace(eps=s.eps.expand(heads).repeat(batch) if isinstance(s.eps, Tensor) else s.eps)
