"""Checks that many constructors share."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

LEAST_FACTOR, LARGEST_FACTOR = 1e-6, 1e6
"""Scores are multiplied and divided by a few factors; products of those within these bounds stay finite in fp32."""


def require_count(name: str, value: Any, least: int = 1) -> None:
    """Refuse anything but an integer of at least `least`: `rank=8.0` would fail later, far from where it was said."""
    # numpy's integers are welcome; True is an integer only by accident
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name} must be an integer, got {value!r}.")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}.")


def is_number(value: Any) -> bool:
    """True for a finite real number; True and False are none."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def require_positive(name: str, value: Any, *, or_zero: bool = False) -> None:
    """Refuse anything but a finite number above 0, or at least 0."""
    if not is_number(value) or value < 0 or (value == 0 and not or_zero):
        raise ValueError(f"{name} must be {'at least' if or_zero else 'above'} 0, got {value!r}.")


def require_moderate(
    name: str, value: Any, *, signed: bool = False, least: float = LEAST_FACTOR, most: float = LARGEST_FACTOR
) -> None:
    """Refuse numbers that a forward in fp32 does not survive, and what is no number at all."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    require_positive(name, abs(value) if signed and number else value, or_zero=least == 0)
    if not least <= abs(value) <= most:
        size = "of a size " if signed else ""
        raise ValueError(f"{name} must be {size}between {least:g} and {most:g}, got {value!r}.")


def require_probability(name: str, value: Any) -> None:
    """Refuse anything but a number in [0, 1)."""
    if not is_number(value) or not 0 <= value < 1:
        raise ValueError(f"{name} must be a probability in [0, 1), got {value!r}.")
