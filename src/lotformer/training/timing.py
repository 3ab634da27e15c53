"""Where the time of a step goes: how much of it attention takes, forward and backward."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Attention


class AttentionClock:
    """Seconds spent in the `Attention` modules of a model during the steps that are watched.

    The forward is timed around the module. The backward is timed from the gradient of the module's output to the
    last gradient of its inputs; the hooks are on tensors, so that results stay bit for bit what they are. Devices are
    synchronised meanwhile: watch few steps.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [module for module in model.modules() if isinstance(module, Attention)]
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._intervals: list[list[float]] = []
        self.seconds = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around forward and backward of a batch; adds to `seconds`."""
        hooks = [m.register_forward_pre_hook(self._enter, with_kwargs=True) for m in self._modules]
        hooks += [m.register_forward_hook(self._leave, with_kwargs=True) for m in self._modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self.seconds += sum(end - start for start, end in self._intervals)
            self._intervals = []

    def take(self) -> float:
        """The seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        now = self._now()
        self._intervals.append([now, now])

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._intervals[-1][1] = self._now()
        inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.requires_grad]
        if not (isinstance(output, Tensor) and output.requires_grad and inputs):
            return
        backward: list[float] = []

        def begin(gradient: Tensor) -> None:
            backward[:] = [self._now()] * 2
            self._intervals.append(backward)

        def end(gradient: Tensor) -> None:
            if backward:
                backward[1] = self._now()

        output.register_hook(begin)
        for tensor in inputs:
            tensor.register_hook(end)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
