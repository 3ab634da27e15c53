"""Detect values that are not finite cheaply, and never apply, save or prefer them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..ops.checks import NonFiniteError


def numbers(scalars: Sequence[Tensor]) -> list[float]:
    """The values of scalars, read in one transfer."""
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in scalars) else torch.float32
    device = scalars[0].device
    return torch.stack([x.detach().reshape(()).to(device, dtype) for x in scalars]).tolist()


def better(value: float, best: float | None, *, higher: bool) -> bool:
    """True if a measurement beats the best one so far; one that is not finite neither wins nor stays best."""
    if not math.isfinite(value):
        return False
    return best is None or not math.isfinite(best) or (value > best if higher else value < best)


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors (of a sharded one, this process's part) with a value that is not finite."""
    parts = {name: getattr(x, "to_local", lambda x=x: x)() for name, x in tensors.items()}
    return [name for name, x in parts.items() if x.is_floating_point() and not bool(torch.isfinite(x).all())]


def require_finite(names: Iterable[str], step: int) -> None:
    """Raise if there are names of weights that are not finite after a step."""
    if first := next(iter(names), None):
        raise NonFiniteError(
            f"after step {step} the weight {first} is not finite: the learning rate is too high, or it was so from "
            "the start. Nothing of it was saved. Start again at a lower rate from the last checkpoint or older weights."
        )


class Buffers:
    """Buffers that a forward pass changes, e.g. running statistics, saved before a step in case it is not taken."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._live = list(tensors)
        self._before: list[Tensor] | None = None

    def keep(self) -> None:
        """Called before every forward; the first one of a step counts."""
        if self._before is None:
            self._before = [tensor.clone() for tensor in self._live]

    def accept(self) -> None:
        self._before = None

    @torch.no_grad()
    def undo(self) -> None:
        for tensor, before in zip(self._live, self._before or (), strict=False):
            tensor.copy_(before)
        self._before = None
