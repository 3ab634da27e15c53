"""Checks that many constructors share."""

from __future__ import annotations

from typing import Any


def require_count(name: str, value: Any, least: int = 1) -> None:
    """Refuse anything but an integer of at least `least`: `rank=8.0` would fail later, far from where it was said."""
    # numpy's integers are welcome; True is an integer only by accident
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name} must be an integer, got {value!r}.")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}.")
