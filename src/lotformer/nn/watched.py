"""Detect modules with hooks."""

from __future__ import annotations

from torch import nn


def is_watched(module: nn.Module) -> bool:
    """True if the module has hooks, so that it must be called rather than read."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
