"""From gradients to new weights, on one process: fp32 masters, clipping and the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .precision import Masters

ParamGroup = dict[str, Any]


class Updates(Protocol):
    """What a loop needs to change a model: on one process (`LocalUpdates`) or on many."""

    def collecting(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a batch; `last` if a step follows, so that processes must meet."""

    def backward(self, loss: Tensor) -> None: ...

    def apply(self, factor: float) -> None:
        """One step of the optimizer at `factor` times the peak learning rates; gradients are gone afterwards."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def foreign(self, state: Mapping[str, Any]) -> str:
        """Why a saved state must be that of another model, in words; empty if nothing speaks against it."""


class LocalUpdates:
    """Updates of parameters of any precision on this process.

    Args:
        weights: live tensors by name: the trained parameters, and whatever else a step changes (running statistics).
        groups: of parameters, with `lr` and other options, as optimizers take them.
        optimizer: makes the optimizer from the groups, e.g. `torch.optim.AdamW`.
        clip: the largest norm of the gradient, None for no limit.
        start: a fingerprint of the weights that the run begins with, if it depends on them. A checkpoint is then taken
            up only by a model with these weights, or with those that the run has reached.

    Attributes:
        slowed: a factor of every rate, for whoever sees that they are too high, and who restores it after an interrupt.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        groups: Iterable[ParamGroup],
        optimizer: Callable[[list[ParamGroup]], torch.optim.Optimizer],
        clip: float | None = None,
        start: str | None = None,
    ) -> None:
        groups = [group for group in groups if group["params"]]
        self.weights, self.clip, self.start = dict(weights), clip, start
        self.parameters: list[nn.Parameter] = [parameter for group in groups for parameter in group["params"]]
        self.masters = Masters(self.parameters)
        self.optimizer = optimizer([{**group, "params": self.masters.of(group["params"])} for group in groups])
        self.slowed = 1.0
        self.peaks = [group["lr"] for group in self.optimizer.param_groups]

    def collecting(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def apply(self, factor: float) -> None:
        self.masters.take_gradients()
        if self.clip is not None:
            nn.utils.clip_grad_norm_([p for group in self.optimizer.param_groups for p in group["params"]], self.clip)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * factor * self.slowed
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.masters.publish()

    @torch.no_grad()
    def restart(self, values: Iterable[Tensor]) -> None:
        """Go on from these values of the parameters, in their order, without momentum."""
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)
        self.masters.follow()
        self.optimizer.state.clear()

    def state_dict(self) -> dict[str, Any]:
        return {
            "start": self.start,
            "weights": {name: tensor.detach() for name, tensor in self.weights.items()},
            "masters": self.masters.state(),
            "optimizer": self.optimizer.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.start = state["start"]
        for name, tensor in self.weights.items():
            tensor.copy_(state["weights"][name])
        self.masters.load(state["masters"])
        self.optimizer.load_state_dict(state["optimizer"])

    def foreign(self, state: Mapping[str, Any]) -> str:
        if self.start == state["start"]:
            return ""
        reached = all(torch.equal(tensor.cpu(), state["weights"][name]) for name, tensor in self.weights.items())
        return "" if reached else "the model's weights are neither those it began with nor those it reached"
