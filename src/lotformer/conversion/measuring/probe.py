"""Before and after: run a model on one batch without leaving a trace, and compare outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...data.batches import Batch, main_tensor
from .. import hosts
from ..calling import call
from .report import Probe


@torch.no_grad()
def output(model: nn.Module, batch: Batch | None, *, made_up: bool) -> Tensor | None:
    """The main output in evaluation mode; the mode is put back. None without a batch.

    A made-up batch need not suit every model and mechanism: None if it does not.
    """
    if batch is None:
        return None
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        return main_tensor(call(model, batch)).float()
    except Exception:
        if made_up:
            return None
        raise
    finally:
        for module, training in modes.items():
            module.training = training


def difference(before: Tensor | None, after: Tensor | None) -> Probe | None:
    """Relative change and mean cosine of the last dimension."""
    if before is None or after is None:
        return None
    change = float((after - before).norm() / before.norm().clamp_min(1e-30))
    return Probe(change, float(torch.cosine_similarity(before, after, dim=-1).mean()))


def sample_inputs(model: nn.Module) -> Batch | None:
    """Two random samples of the kind the model takes, as its host makes them up; None where none can tell."""
    parameter = next(model.parameters(), None)
    if parameter is None or parameter.device.type == "meta":
        return None
    for host in hosts.present():
        batch = host.sample_inputs(model)
        if batch is not None:
            return _moved(batch, parameter.detach())
    return None


def _moved(batch: Any, like: Tensor) -> Batch:
    """To the device of a model, floats in its precision, too."""
    if isinstance(batch, Tensor):
        return batch.to(like) if batch.is_floating_point() else batch.to(like.device)
    if isinstance(batch, Mapping):
        return {name: _moved(value, like) for name, value in batch.items()}
    return [_moved(value, like) for value in batch]
