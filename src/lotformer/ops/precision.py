"""What must be computed in the precision it is in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_AS_IT_IS: AbstractContextManager[None] = nullcontext()


def no_autocast(device_type: str) -> AbstractContextManager[None]:
    """While inside, autocast changes nothing. Where it is off anyway, which is cheaper to ask than to do, it stays."""
    return torch.autocast(device_type, enabled=False) if is_autocast(device_type) else _AS_IT_IS


def is_autocast(device_type: str) -> bool:
    """Whether autocast changes what is computed there; the meta device, which computes nothing, knows none."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)
