"""Forms of LOT that several experiments compare, as options of `convert`.

Everything that their names stand for is said, so that a cell means the same whatever the defaults of `convert` become.
"""

from __future__ import annotations

from typing import Any

TRANSPORT: dict[str, Any] = {"pivots": "fixed", "window": None, "balance": "both"}
AWARE: dict[str, Any] = {**TRANSPORT, "pivots": "input-aware"}
NEAR: dict[str, Any] = {"pivots": "input-aware", "balance": "both", "window_size": 5, "prefix_tokens": 0}
"""With a window of five tokens along a text, or of 5 × 5 patches."""
WIDE: dict[str, Any] = {**NEAR, "balance": "keys", "window_size": 129}
"""Forms of a text encoder that `convert` can make."""
