"""Calling a model of any host with a batch of any form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..data.batches import Batch, inputs_of, require_contents, tensors_of, to_learn_from
from . import hosts


def call(model: nn.Module, batch: Batch) -> Any:
    """The model's output on a batch of any of the accepted forms.

    Raises:
        ValueError: the batch is empty, or lacks what the model needs.
    """
    inputs = inputs_of(batch)
    require_contents(inputs)
    if isinstance(inputs, Mapping):
        inputs = {name: to_learn_from(value) for name, value in inputs.items()}
    present = hosts.present()
    try:
        if not isinstance(inputs, Mapping):
            return model(to_learn_from(inputs))
        if any(host.takes_a_mapping(model) for host in present):
            return model(inputs)
        return model(**inputs)
    except Exception as error:
        missing = [name for host in present for name in host.missing_inputs(model, inputs)]
        if not missing:
            raise
        given = ", ".join(tensors_of(inputs))
        raise ValueError(
            f"{type(model).__name__} does not run on a batch of {given}: it needs {' and '.join(missing)}, too. "
            f"It said: {error}"
        ) from error
