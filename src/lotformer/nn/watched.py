"""Modules that somebody looks at."""

from __future__ import annotations

from torch import nn


def is_watched(module: nn.Module) -> bool:
    """Whether somebody expects the module to be called: hooks see what passes through it."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
