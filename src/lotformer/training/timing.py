"""The share of a step's time that attention takes, forward and backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..attention import Attention


class AttentionClock:
    """Seconds spent in the `Attention` modules of a model during the steps that are watched.

    The forward is timed around the module. The backward is timed from the gradient of the module's output to the
    last gradient of its inputs, so where a mechanism reads the input of its layer, projections are in it. Results stay
    bit for bit what they are: methods are wrapped, as layers that see a hook on a module take another way through it,
    and what is hooked are tensors. Devices are synchronised meanwhile: watch few steps.
    """

    _METHODS = ("forward", "attend_unformed")

    def __init__(self, model: nn.Module) -> None:
        modules = [module for module in model.modules() if isinstance(module, Attention)]
        self._methods = [(m, name) for m in modules for name in self._METHODS if hasattr(m, name)]
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._intervals: list[list[float]] = []
        self._hooks: list[RemovableHandle] = []
        self._inside = False
        self.seconds = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around forward and backward of a batch; adds to `seconds`."""
        for module, name in self._methods:
            object.__setattr__(module, name, partial(self._timed, getattr(module, name)))
        try:
            yield
        finally:
            for module, name in self._methods:
                object.__delattr__(module, name)  # the class's method is seen again
            for hook in self._hooks:  # parameters outlive the step
                hook.remove()
            self._hooks = []
            self.seconds += sum(end - start for start, end in self._intervals)
            self._intervals = []

    def take(self) -> float:
        """The seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def _timed(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._inside:  # a mechanism within another one counts once
            return method(*args, **kwargs)
        self._inside, start = True, self._now()
        try:
            output = method(*args, **kwargs)
        finally:
            self._inside = False
            self._intervals.append([start, self._now()])
        inputs = [x for x in _tensors((*args, *kwargs.values())) if x.requires_grad]
        if isinstance(output, Tensor) and output.requires_grad and inputs:
            self._time_backward(output, inputs)
        return output

    def _time_backward(self, output: Tensor, inputs: list[Tensor]) -> None:
        backward: list[float] = []

        def begin(gradient: Tensor) -> None:
            backward[:] = [self._now()] * 2
            self._intervals.append(backward)

        def end(gradient: Tensor) -> None:
            if backward:
                backward[1] = self._now()

        self._hooks += [output.register_hook(begin), *(tensor.register_hook(end) for tensor in inputs)]

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among some arguments, and in tuples among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)
