"""How exact and how doubly stochastic the attention inside a model is, on given inputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...attention import Attention
from ...attention.diagnose import is_matrix
from ...attention.lot import LOT
from ...attention.masking import zero_padding
from ...data.batches import Batch, call


@dataclass(frozen=True)
class CouplingQuality:
    """Marginals of the attention matrices, over all layers, heads and samples looked at.

    Attributes:
        residual_mean, residual_max: relative deviation of the column sums from the masses in force (None for
            mechanisms that have no masses, and where all inputs are read by softmax). Mean over keys, worst key.
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


class _Inspector:
    """A hook that sees what an attention mechanism is about to mix, and looks at the matrix that it will use."""

    def __init__(self) -> None:
        self.residuals: list[Tensor] = []
        self.errors: list[Tensor] = []

    def __call__(self, mechanism: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(mechanism, Attention)
        self.look(mechanism, *args, **kwargs)

    def look(self, mechanism: Attention, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None,
             query_mask: Tensor | None = None, *, grid: tuple[int, int] | None = None) -> None:  # fmt: skip
        real = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device) if key_mask is None else key_mask
        sums: Tensor | None = None
        if isinstance(mechanism, LOT):
            prefix = mechanism.prefix_tokens
            plan = mechanism.coupling(q, k, key_mask, query_mask, grid=grid)
            deviations = plan.deviations()
            if not mechanism.is_softmax(q.shape[2], grid):  # there is no plan in it
                self.residuals.append(deviations[real[:, None, prefix:].expand_as(deviations)])
            # where the plan is the whole matrix
            sums = plan.column_sums() if not prefix and mechanism.near is None else None
            mechanism = mechanism.without_local_mixing()
        if sums is None:
            sums = _column_sums(mechanism, q, k, v, key_mask, query_mask, grid)
        self.errors.append((sums - 1).abs()[real[:, None].expand_as(sums)])


def _column_sums(
    mechanism: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    grid: tuple[int, int] | None,
) -> Tensor:
    """`Aᵀ1`, the gradient of `Σ (A v)` for `v`, without the matrix: that of a large image has no room in memory."""
    with torch.enable_grad():
        some = v.new_zeros(*k.shape[:3], 1).requires_grad_()
        # past the hooks, or the one who asks would hear of itself
        out = mechanism.forward(q, k, zero_padding(some, key_mask), key_mask, query_mask, grid=grid)
        (sums,) = torch.autograd.grad(out.sum(), some)
    return sums[..., 0]


@torch.no_grad()
def coupling_quality(model: nn.Module, batches: Iterable[Batch]) -> CouplingQuality | None:
    """Run the model on the batches and look at every coupling in it; None if it has no matrices to look at.

    The model is a converted one, or has layers of ours: `AttentionLayer`, `lotformer.models`. Of a convolution beside
    the attention nothing is said: it has no rows and columns.

    Raises:
        ValueError: there is no attention of ours in it.
    """
    mechanisms = _mechanisms(model)
    if not mechanisms:
        raise ValueError(
            f"{type(model).__name__} holds no attention of lotformer: call `lotformer.convert(model)` first."
        )
    looked_at = [mechanism for mechanism in mechanisms if isinstance(mechanism, LOT) or is_matrix(mechanism)]
    if not looked_at:
        return None
    inspector = _Inspector()
    modes = {module: module.training for module in model.modules()}
    model.eval()
    hooks = [mechanism.register_forward_pre_hook(inspector, with_kwargs=True) for mechanism in looked_at]
    try:
        for batch in batches:
            call(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes.items():
            module.training = training
    error = torch.cat(inspector.errors)
    residual = torch.cat(inspector.residuals) if inspector.residuals else None
    return CouplingQuality(
        residual_mean=None if residual is None else float(residual.mean()),
        residual_max=None if residual is None else float(residual.max()),
        doubly_stochastic_mean=float(error.mean()),
        doubly_stochastic_max=float(error.max()),
    )


def _mechanisms(model: nn.Module) -> list[Attention]:
    """The attention in a model without what wraps it, e.g. for special tokens."""
    found = [module for module in model.modules() if isinstance(module, Attention)]
    return [module for module in found if sum(isinstance(part, Attention) for part in module.modules()) == 1]
