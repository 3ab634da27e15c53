"""Which parameters decay: timm's rule, and never what LOT says must not."""

from __future__ import annotations

from torch import nn

from .updates import ParamGroup


def undecayed(model: nn.Module) -> set[str]:
    """Names of the parameters that the model or any module in it excepts from weight decay."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in getattr(module, "no_weight_decay", set)()
    }


def parameter_groups(model: nn.Module, weight_decay: float) -> list[ParamGroup]:
    """The groups that timm makes: norms, biases, scalars, pivots, masses and ε do not decay; the rest does."""
    try:
        from timm.optim import param_groups_weight_decay
    except ImportError as error:
        raise ImportError("training needs timm: pip install 'lotformer[train]'.") from error
    return param_groups_weight_decay(model, weight_decay, no_weight_decay_list=undecayed(model))
