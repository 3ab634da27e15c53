"""Learning-rate schedules: the factor of the peak rate at a step, a pure function of where the run is.

Every schedule takes `(step, steps, warmup, final)`: the step about to be taken, counted from 0, of `steps`; how many
steps the rate rises from near 0 to its peak; and the factor it falls to (`inverse_sqrt`, which has no end, ignores it).
"""

from __future__ import annotations

import math
from collections.abc import Callable

Schedule = Callable[[int, int, int, float], float]


def cosine(step: int, steps: int, warmup: int = 0, final: float = 0.0) -> float:
    """A linear rise, then half a cosine from 1 to `final`."""
    if step < warmup:
        return (step + 1) / warmup
    return final + (1 - final) * _fall((step - warmup) / max(1, steps - warmup))


def one_cycle(step: int, steps: int, warmup: int = 0, final: float = 0.0) -> float:
    """Half a cosine up from 1/25, then half a cosine down to `final`: Smith's 1cycle policy, as PyTorch anneals it."""
    if step < warmup:
        return 1 - (1 - 1 / 25) * _fall(step / warmup)
    return final + (1 - final) * _fall((step - warmup) / max(1, steps - warmup))


def inverse_sqrt(step: int, steps: int, warmup: int = 0, final: float = 0.0) -> float:
    """A linear rise, then `√(warmup / step)`: the schedule of the original Transformer."""
    if step < warmup:
        return (step + 1) / warmup
    return math.sqrt(max(1, warmup) / max(1, step + 1, warmup))


def _fall(progress: float) -> float:
    """Half a cosine from 1 at progress 0 to 0 at progress 1."""
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


SCHEDULES: dict[str, Schedule] = {"cosine": cosine, "one-cycle": one_cycle, "inverse-sqrt": inverse_sqrt}
