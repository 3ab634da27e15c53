"""From gradients to new weights, on one process: fp32 masters, clipping and the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .finite import Buffers, not_finite
from .precision import Masters

ParamGroup = dict[str, Any]


class Updates(Protocol):
    """The interface through which a loop updates a model, on one process (`LocalUpdates`) or many."""

    def collecting(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a batch; `last` if a step follows, so that processes must meet."""

    def backward(self, loss: Tensor) -> None: ...

    def norm(self) -> Tensor:
        """The norm of the gradient that was collected, on its device. `apply` or `drop` comes next."""

    def apply(self, factor: float) -> None:
        """One step of the optimizer at `factor` times the peak learning rates; gradients are gone afterwards."""

    def drop(self) -> None:
        """Forget the gradient and what the forwards changed: all is as before the step."""

    def not_finite(self) -> list[str]:
        """Names of trained weights, on this process, that are not finite."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def foreign(self, state: Mapping[str, Any]) -> str:
        """The reason why a saved state belongs to another model; empty if it fits."""


class LocalUpdates:
    """Updates of parameters of any precision on this process.

    Args:
        weights: live tensors by name: the trained parameters, and whatever else a step changes (running statistics).
        groups: of parameters, with `lr` and other options, as optimizers take them.
        optimizer: makes the optimizer from the groups, e.g. `torch.optim.AdamW`.
        clip: the largest norm of the gradient, None for no limit.
        buffers: those of `weights` that a forward changes, e.g. running statistics.
        start: a fingerprint of the weights that the run begins with, if it depends on them. A checkpoint is then taken
            up only by a model with these weights, or with those that the run has reached.

    Attributes:
        slowed: a factor of every rate, for whoever sees that they are too high, and who restores it after an interrupt.
        best: what `remember` has kept of `weights`, by name; empty before.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        groups: Iterable[ParamGroup],
        optimizer: Callable[[list[ParamGroup]], torch.optim.Optimizer],
        clip: float | None = None,
        start: str | None = None,
        buffers: Iterable[Tensor] = (),
    ) -> None:
        groups = [group for group in groups if group["params"]]
        self.weights, self.clip, self.start = dict(weights), clip, start
        self.parameters: list[nn.Parameter] = [parameter for group in groups for parameter in group["params"]]
        self.masters = Masters(self.parameters)
        buffers = list(buffers)
        self.buffers, self.best = Buffers(buffers), dict[str, Tensor]()
        changing = {tensor.data_ptr() for tensor in (*self.parameters, *buffers)}
        self._changing = [name for name, tensor in self.weights.items() if tensor.data_ptr() in changing]
        self.optimizer = optimizer([{**group, "params": self.masters.of(group["params"])} for group in groups])
        self.slowed = 1.0
        self.peaks = [group["lr"] for group in self.optimizer.param_groups]

    def collecting(self, last: bool) -> AbstractContextManager[Any]:
        self.buffers.keep()
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def norm(self) -> Tensor:
        self.masters.take_gradients()
        self._norm = nn.utils.get_total_norm([p.grad for p in self._held() if p.grad is not None])
        return self._norm

    def apply(self, factor: float) -> None:
        if self.clip is not None:
            nn.utils.clip_grads_with_norm_(self._held(), self.clip, self._norm)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * factor * self.slowed
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.masters.publish()
        self.buffers.accept()

    def drop(self) -> None:
        self.optimizer.zero_grad()
        for parameter in self.parameters:  # of those in half precision the optimizer knows nothing
            parameter.grad = None
        self.buffers.undo()

    def not_finite(self) -> list[str]:
        return not_finite({name: self.weights[name] for name in self._changing})

    def remember(self) -> None:
        """Keep the weights as they are now: so far they are the best."""
        self.best = {name: self.weights[name].detach().clone() for name in self._changing}

    @torch.no_grad()
    def go_back(self) -> None:
        """To the best weights, if any were kept."""
        for name, kept in self.best.items():
            self.weights[name].copy_(kept)
        self.masters.follow()

    def restart(self) -> None:
        """Go on from the best weights, without momentum."""
        self.go_back()
        self.optimizer.state.clear()

    def _held(self) -> list[nn.Parameter]:
        """The state of the optimizer."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        return {
            "start": self.start,
            "weights": {name: tensor.detach() for name, tensor in self.weights.items()},
            "best": self.best,
            "masters": self.masters.state(),
            "optimizer": self.optimizer.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.start, self.best = state["start"], dict(state["best"])
        for name, tensor in self.weights.items():
            tensor.copy_(state["weights"][name])
        self.masters.load(state["masters"])
        self.optimizer.load_state_dict(state["optimizer"])

    def foreign(self, state: Mapping[str, Any]) -> str:
        if self.start == state["start"]:
            return ""
        for known in (state["weights"], {**state["weights"], **state["best"]}):
            if all(torch.equal(tensor.cpu(), known[name]) for name, tensor in self.weights.items()):
                return ""
        return "the model's weights are neither those it began with nor those it reached, last or at best"
