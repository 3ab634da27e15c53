"""Which parameters decay: timm's rule, and never what LOT says must not."""

from __future__ import annotations

from torch import nn

from ..nn import no_weight_decay
from .updates import ParamGroup


def parameter_groups(model: nn.Module, weight_decay: float) -> list[ParamGroup]:
    """The groups that timm makes: norms, biases, scalars, pivots, masses and ε do not decay; the rest does."""
    try:
        from timm.optim import param_groups_weight_decay
    except ImportError as error:
        raise ImportError("training needs timm: pip install 'lotformer[train]'.") from error
    return param_groups_weight_decay(model, weight_decay, no_weight_decay_list=no_weight_decay(model))
