"""The parts of timm that training uses: its parameter groups and its average of the weights."""

from __future__ import annotations

from typing import Any


def parts() -> tuple[Any, Any]:
    """`(param_groups_weight_decay, ModelEmaV3)`, imported when they are needed: timm takes seconds."""
    try:
        from timm.optim import param_groups_weight_decay
        from timm.utils import ModelEmaV3
    except ImportError as error:
        raise ImportError("training needs timm: pip install 'lotformer[train]'.") from error
    return param_groups_weight_decay, ModelEmaV3
