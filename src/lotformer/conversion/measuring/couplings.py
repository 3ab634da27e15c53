"""Residuals and doubly stochastic errors of the attention inside a model, on given inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ...attention import Attention
from ...attention.diagnose import is_matrix
from ...attention.lot import LOT
from ...attention.masking import zero_padding
from ...data.batches import Batch
from ...ops import Coupling
from ..calling import call
from ..hosts.sites import transporting

_A = TypeVar("_A", bound=Attention)


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


class _Call(NamedTuple):
    """The arguments of an attention mechanism's call, by name."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None = None
    query_mask: Tensor | None = None
    grid: tuple[int, int] | None = None

    def real(self) -> Tensor:
        if self.key_mask is not None:
            return self.key_mask
        return torch.ones(self.k.shape[0], self.k.shape[2], dtype=torch.bool, device=self.k.device)

    def plan(self, mechanism: LOT) -> Coupling:
        return mechanism.coupling(self.q, self.k, self.key_mask, self.query_mask, grid=self.grid)

    def has_plan(self, mechanism: LOT) -> bool:
        """True if something is transported, not everything read by softmax."""
        return not mechanism.is_softmax(self.q.shape[2], self.grid)


@contextmanager
def _watched(mechanisms: Mapping[str, _A], look: Callable[[str, _A, _Call], None]) -> Iterator[None]:
    """While inside, every call of a mechanism is looked at before it is done."""

    def hook(name: str) -> Callable[..., None]:
        return lambda module, args, kwargs: look(name, module, _Call(*args, **kwargs))

    handles = [module.register_forward_pre_hook(hook(name), with_kwargs=True) for name, module in mechanisms.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def couplings_watched(model: nn.Module) -> Iterator[dict[str, float]]:
    """While inside, every call of a LOT layer notes under its name how far its coupling is from its sums, at most.

    Where nothing is balanced there is nothing to miss: what counts then is how uneven the columns are.
    """
    missed: dict[str, float] = {}

    def note(name: str, mechanism: LOT, called: _Call) -> None:
        if called.has_plan(mechanism):
            plan = called.plan(mechanism)
            worst = plan.doubly_stochastic_error() if mechanism.config.balance == "none" else plan.residual()
            missed[name] = float(worst.max())

    with _watched({name: module for name, module in model.named_modules() if isinstance(module, LOT)}, note):
        yield missed


def _column_sums(mechanism: Attention, called: _Call) -> Tensor:
    """`Aᵀ1`, the gradient of `Σ (A v)` for `v`, without the matrix: that of a large image has no room in memory."""
    q, k, v, key_mask, query_mask, grid = called
    with torch.enable_grad():
        some = v.new_zeros(*k.shape[:3], 1).requires_grad_()
        # past the hooks, or the one who asks would hear of itself
        out = mechanism.forward(q, k, zero_padding(some, key_mask), key_mask, query_mask, grid=grid)
        (sums,) = torch.autograd.grad(out.sum(), some)
    return sums[..., 0]


@torch.no_grad()
def coupling_quality(model: nn.Module, batches: Iterable[Batch]) -> CouplingQuality | None:
    """Run the model on the batches and look at every coupling in it; None if it has no matrices to look at.

    The model is a converted one, or has layers of ours: `AttentionLayer`, `lotformer.models`. Couplings of inputs so
    short that the model leaves them to softmax (`softmax_up_to`) are looked at, too. Of a convolution beside
    the attention nothing is said: it has no rows and columns.

    Raises:
        ValueError: there is no attention of ours in it.
    """
    mechanisms = _mechanisms(model)
    if not mechanisms:
        raise ValueError(
            f"{type(model).__name__} holds no attention of lotformer: call `lotformer.convert(model)` first."
        )
    looked_at = {name: each for name, each in mechanisms.items() if isinstance(each, LOT) or is_matrix(each)}
    if not looked_at:
        return None
    residuals: list[Tensor] = []
    errors: list[Tensor] = []

    def look(name: str, mechanism: Attention, called: _Call) -> None:
        real, sums = called.real(), None
        if isinstance(mechanism, LOT):
            prefix = mechanism.prefix_tokens
            plan = called.plan(mechanism)
            if called.has_plan(mechanism):
                deviations = plan.deviations()
                residuals.append(deviations[real[:, None, prefix:].expand_as(deviations)])
            # where the plan is the whole matrix
            sums = plan.column_sums() if not prefix and mechanism.config.window is None else None
            mechanism = mechanism.without_local_mixing()
        if sums is None:
            sums = _column_sums(mechanism, called)
        errors.append((sums - 1).abs()[real[:, None].expand_as(sums)])

    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with transporting(model), _watched(looked_at, look):
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


def _mechanisms(model: nn.Module) -> dict[str, Attention]:
    """The attention in a model by name, without what wraps it, e.g. for special tokens."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, Attention)}
    return {
        name: module
        for name, module in found.items()
        if sum(isinstance(part, Attention) for part in module.modules()) == 1
    }
