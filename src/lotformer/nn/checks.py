"""Checks that many constructors share."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any


def require_count(name: str, value: Any, least: int = 1) -> None:
    """Refuse anything but an integer of at least `least`: `rank=8.0` would fail later, far from where it was said."""
    # numpy's integers are welcome; True is an integer only by accident
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name} must be an integer, got {value!r}.")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}.")


def require_positive(name: str, value: Any, *, or_zero: bool = False) -> None:
    """Refuse anything but a finite number above 0, or at least 0."""
    number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and not or_zero):
        raise ValueError(f"{name} must be {'at least' if or_zero else 'above'} 0, got {value!r}.")
