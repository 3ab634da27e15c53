"""The plans behind LOT attention, to look at: marginals, residuals, clusters, rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import reference


@dataclass(frozen=True, repr=False)
class Coupling:
    """Low-rank attention `A = P Wᵀ` as its two factors.

    Attributes:
        query_plan: P `(B, H, N, R)`; how each query spreads over the pivots. Rows sum to 1.
        key_plan: W `(B, H, M, R)`; how each pivot spreads over the keys. Columns sum to 1.
        masses: masses of the pivots `(H, R)`; where they are not imposed, what the queries send to them `(B, H, R)`.
        query_masses, key_masses: masses of the tokens in force, `(B, 1 or H, N)` and `(B, 1 or H, M)`, zero on
            padding. Where nothing is imposed, those of the keys are what they receive.
        key_mask: which keys are real `(B, M)`; None if all are.
        backend: whose plans they are.
    """

    query_plan: Tensor
    key_plan: Tensor
    masses: Tensor
    query_masses: Tensor
    key_masses: Tensor
    key_mask: Tensor | None = None
    backend: str = "reference"

    def __repr__(self) -> str:
        batch, heads, n, rank = self.query_plan.shape
        shape = f"{n}×{self.key_plan.shape[2]} of rank ≤ {rank}, {batch} samples × {heads} heads"
        return f"Coupling({shape}, {self.query_plan.dtype}, backend={self.backend!r})"

    def apply(self, v: Tensor) -> Tensor:
        """`A v` for values `(B, H, M, Dv)`, in O((N + M) R Dv)."""
        real = (self.key_masses > 0)[..., None]
        return reference.mix(self.query_plan, self.key_plan, torch.where(real, v, 0.0))

    def dense(self) -> Tensor:
        """A itself, `(B, H, N, M)`: for looking, not for computing."""
        return self.query_plan @ self.key_plan.mT

    def row_sums(self) -> Tensor:
        """Row sums of A `(B, H, N)`: 1 for real queries, 0 for padded ones."""
        return (self.query_plan @ self.key_plan.sum(-2)[..., None])[..., 0]

    def column_sums(self) -> Tensor:
        """The mass that each key receives `(B, H, M)`: column sums of A, each row weighted by `N ×` its query's mass.

        With uniform query masses, the default, these are the plain column sums. Converged, they are
        `N ×` the key masses, which is N / M when those are uniform too.
        """
        weights = self._count(self.query_masses) * self.query_masses
        return self._received(weights.expand(self.query_plan.shape[:-1]))

    def residual(self) -> Tensor:
        """Worst relative deviation of the column sums from the key masses in force, per head `(B, H)`.

        The factors are formed again from the potentials of the backend's solve. In fp32 and at small ε, rounding makes
        this larger than what the solve itself reached, which `solve_attention(…).residual` tells.
        """
        return _worst(self.deviations())

    def deviations(self) -> Tensor:
        """Relative deviation of each column sum from its key's mass, `(B, H, M)`.

        A key that should receive less than the rounding of a mean one's share is measured by that rounding: learned
        masses span tens of orders of magnitude, and whether 1e-25 or 0 arrives there changes no output.
        """
        count = self._count(self.query_masses)
        expected = count * self.key_masses
        rounding = torch.finfo(expected.dtype).eps * count / self._count(self.key_masses).clamp_min(1)
        return _deviations(self.column_sums(), expected, rounding)

    def doubly_stochastic_error(self) -> Tensor:
        """Worst relative deviation of the plain column sums of A from uniform, per head `(B, H)`.

        Unlike `residual` it ignores learned or given masses, zeros among them: it is 0 only if A is doubly stochastic.
        """
        received = self._received(torch.ones_like(self.query_plan[..., 0]))
        real = torch.ones_like(received[:, :1]) if self.key_mask is None else self.key_mask[:, None].to(received)
        share = self.query_plan.sum((-2, -1))[..., None] / real.sum(-1, keepdim=True).clamp_min(1)
        return _worst(_deviations(received, share * real))

    def query_clusters(self) -> Tensor:
        """The soft clusters of the queries `(B, H, N, R)`: the mass each query sends to each pivot."""
        return self.query_masses[..., None] * self.query_plan

    def key_clusters(self) -> Tensor:
        """The soft clusters of the keys `(B, H, M, R)`: the mass each key receives from each pivot."""
        return self.masses[..., None, :] * self.key_plan

    def rank(self) -> Tensor:
        """Numerical rank of A, `(B, H)`: never above the number of pivots."""
        query_factor, key_factor = (torch.linalg.qr(x.double(), mode="r").R for x in (self.query_plan, self.key_plan))
        return torch.linalg.matrix_rank(query_factor @ key_factor.mT, rtol=1e-6)

    def _received(self, weights: Tensor) -> Tensor:
        sent = (weights[..., None] * self.query_plan).sum(-2)
        return (self.key_plan @ sent[..., None])[..., 0]

    @staticmethod
    def _count(masses: Tensor) -> Tensor:
        return (masses > 0).sum(-1, keepdim=True)


def _deviations(sums: Tensor, expected: Tensor, least: Tensor | float = 0.0) -> Tensor:
    """Relative to what is expected, or to `least` where that is more; absolute where both are nothing."""
    scale = torch.maximum(expected, torch.as_tensor(least, dtype=expected.dtype, device=expected.device))
    return (sums - expected).abs() / torch.where(scale > 0, scale, 1.0)


def _worst(deviations: Tensor) -> Tensor:
    """Over the keys, of which there may be none."""
    return deviations.amax(-1) if deviations.shape[-1] else deviations.sum(-1)
