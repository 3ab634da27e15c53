"""How exact and how doubly stochastic the attention inside a converted model is, on given inputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ... import attention
from ...attention import Attention
from ...attention.lot import LOT
from ...attention.masking import zero_padding
from ...data.batches import Batch, call
from ..hosts.sites import record_of, require_converted, substituted


@dataclass(frozen=True)
class CouplingQuality:
    """Marginals of the attention matrices, over all layers, heads and samples looked at.

    Attributes:
        residual_mean, residual_max: relative deviation of the column sums from the masses in force (None for
            mechanisms that have no masses). Mean over keys, worst key.
        doubly_stochastic_mean, doubly_stochastic_max: relative deviation of the column sums from 1. Zero only for a
            doubly stochastic matrix; learned key masses are not one, and this says by how much.
    """

    residual_mean: float | None
    residual_max: float | None
    doubly_stochastic_mean: float
    doubly_stochastic_max: float

    def __str__(self) -> str:
        residual = "–" if self.residual_max is None else f"{self.residual_mean:.1e} | {self.residual_max:.1e}"
        doubly = f"{self.doubly_stochastic_mean:.2g} | {self.doubly_stochastic_max:.2g}"
        return f"residual {residual}, doubly stochastic error {doubly} (mean | max)"


class _Inspector(Attention):
    def __init__(self, mechanism: Attention, residuals: list[Tensor], errors: list[Tensor]) -> None:
        super().__init__(mechanism.head_dim, mechanism.num_heads)
        self.mechanism = mechanism
        self.residuals = residuals
        self.errors = errors

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None,
                query_mask: Tensor | None = None, *, grid: tuple[int, int] | None = None) -> Tensor:  # fmt: skip
        real = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device) if key_mask is None else key_mask
        count = real.sum(-1)[:, None, None]
        sums: Tensor | None = None
        if isinstance(self.mechanism, LOT):
            prefix = self.mechanism.prefix_tokens
            plan = self.mechanism.coupling(q, k, key_mask, query_mask, grid=grid)
            carried, expected = plan.column_sums(), (count - prefix) * plan.key_masses
            relative = (carried - expected).abs() / expected.expand_as(carried).clamp_min(1e-30)
            self.residuals.append(relative[real[:, None, prefix:].expand_as(relative)])
            sums = carried if not prefix and self.mechanism.near is None else None  # the plan is the whole matrix
        if sums is None:
            identity = torch.eye(k.shape[2], dtype=v.dtype, device=v.device).expand(*k.shape[:3], -1)
            sums = self.mechanism(q, k, zero_padding(identity, key_mask), key_mask, query_mask, grid=grid).sum(-2)
        self.errors.append((sums - 1).abs()[real[:, None].expand_as(sums)])
        return self.mechanism(q, k, v, key_mask, query_mask, grid=grid)


@torch.no_grad()
def coupling_quality(model: nn.Module, batches: Iterable[Batch]) -> CouplingQuality | None:
    """Run the converted model on the batches and look at every coupling; None if it has no matrices to look at."""
    record = record_of(require_converted(model)[0][1])
    assert record is not None
    if not attention.entry(record.recipe.mechanism).is_matrix:
        return None
    residuals: list[Tensor] = []
    errors: list[Tensor] = []
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with substituted(model, lambda _, mechanism: _Inspector(mechanism, residuals, errors)):
            for batch in batches:
                call(model, batch)
    finally:
        for module, training in modes.items():
            module.training = training
    error = torch.cat(errors)
    residual = torch.cat(residuals) if residuals else None
    return CouplingQuality(
        residual_mean=None if residual is None else float(residual.mean()),
        residual_max=None if residual is None else float(residual.max()),
        doubly_stochastic_mean=float(error.mean()),
        doubly_stochastic_max=float(error.max()),
    )
