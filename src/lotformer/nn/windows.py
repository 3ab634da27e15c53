"""Windows: the neighbours that a token sees, along a sequence or on a grid."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

from ..ops import Reach
from ..ops.plain.window import CHUNK
from .checks import require_count
from .depthwise import square_grid

WindowKind = Literal["1d", "2d"]


def require_window(kind: Any, size: Any) -> None:
    """Refuse a window that cannot be built."""
    if kind not in get_args(WindowKind):
        raise ValueError(f"window must be None, '1d' or '2d', got {kind!r}.")
    require_count("window_size", size)
    if size % 2 == 0:
        raise ValueError(f"window_size must be odd, so that a token is in the middle; got {size}.")


def reach_of(kind: WindowKind, size: int, length: int, grid: tuple[int, int] | None) -> Reach:
    """The reach of a window on so many tokens; `grid` holds them, or they form a square."""
    around = size // 2
    return Reach(None, 0, around) if kind == "1d" else Reach(square_grid(length, grid), around, around)


def sees_all(kind: WindowKind, size: int, length: int, grid: tuple[int, int] | None) -> bool:
    """True if every window on a sequence of this length holds all of it."""
    around = size // 2
    if kind == "1d":
        return length <= around + 1
    return length <= (around + 1) ** 2 and max(square_grid(length, grid)) <= around + 1


def window_cost(size: int, kind: WindowKind, n: int, d: int) -> float:
    """Floating-point operations of the two products with the candidates of every token."""
    candidates = size * math.sqrt(n) if kind == "2d" else 3 * max(CHUNK, size // 2)
    return 4.0 * n * candidates * d
