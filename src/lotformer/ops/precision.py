"""Regions in which autocast is disabled."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_AS_IT_IS: AbstractContextManager[None] = nullcontext()


def no_autocast(device_type: str) -> AbstractContextManager[None]:
    """Disable autocast if it is enabled."""
    return torch.autocast(device_type, enabled=False) if is_autocast(device_type) else _AS_IT_IS


def is_autocast(device_type: str) -> bool:
    """True if autocast is enabled on the device; the meta device, which computes nothing, has none."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)
