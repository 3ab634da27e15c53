"""Weight decay by timm's rule, without the parameters that LOT exempts."""

from __future__ import annotations

from torch import nn

from ..nn import no_weight_decay
from . import timm_parts
from .updates import ParamGroup


def parameter_groups(model: nn.Module, weight_decay: float) -> list[ParamGroup]:
    """The groups that timm makes: norms, biases, scalars, pivots, masses and ε do not decay; the rest does."""
    param_groups_weight_decay, _ = timm_parts.parts()
    return param_groups_weight_decay(model, weight_decay, no_weight_decay_list=no_weight_decay(model))
