"""The interface of a task, e.g. image classification: a model, data, a loss and a metric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from .settings import TrainSettings
from .stream import TrainingStream
from .teams import Process

Sums = Mapping[str, tuple[float, float]]
"""Metrics as (sum, count), e.g. `{"accuracy": (correct, seen)}`: sums of processes can be added."""


class Task(Protocol):
    """A model to train and how to tell how good it is.

    Attributes:
        name: names the task in logs and checkpoints.
        settings: those of every run, and the task's own.
        metric: the one of `evaluate` that decides which weights are best. higher_is_better: which way.
    """

    name: str
    metric: str
    higher_is_better: bool

    @property
    def settings(self) -> TrainSettings: ...

    def build_model(self) -> nn.Module:
        """A model with fresh weights, on the CPU. The random generators are seeded."""

    def stream(self, process: Process) -> TrainingStream:
        """The training batches of a process; `loader.LoaderStream` suits every map-style data set."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss over the samples of a batch, a scalar. `model` must be called, not its parts."""

    def evaluate(self, model: nn.Module, process: Process) -> Sums:
        """Metrics of this process's share of the evaluation data; the loop adds them up.

        The model is in eval mode, on the device of its parameters, and gradients are off.
        """
