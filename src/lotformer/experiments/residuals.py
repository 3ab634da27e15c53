"""How far the columns of LOT's couplings are from their sums while a model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..attention.lot import LOT


@contextmanager
def couplings_watched(model: nn.Module) -> Iterator[dict[str, float]]:
    """While inside, every call of a LOT layer notes the residual of its coupling under the layer's name."""
    residuals: dict[str, float] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: LOT, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            q, k, _, *masks = args
            coupling = module.coupling(q, k, *masks)
            # where nothing is balanced there is nothing to miss: what counts is how uneven the columns are
            missed = coupling.doubly_stochastic_error() if module.balance == "none" else coupling.residual()
            residuals[name] = float(missed.max())

        return hook

    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, LOT)]
    handles = [module.register_forward_pre_hook(note(name), with_kwargs=True) for name, module in layers]
    try:
        yield residuals
    finally:
        for handle in handles:
            handle.remove()
