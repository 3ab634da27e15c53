"""When a training run solves LOT's couplings exactly, and when it makes do with sweeps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from ...attention import Attention
from ...attention.config import Newton, Sinkhorn
from ...attention.lot import LOT


class ExactShare:
    """Sinkhorn sweeps first, exact solves for the last `share` of the steps.

    Only mechanisms that were converted with the exact solver are switched, and `restore` leaves them so.
    """

    def __init__(self, mechanisms: Iterable[Attention], steps: int, share: float) -> None:
        self.switched = [
            (m, m.config) for m in mechanisms if isinstance(m, LOT) and isinstance(m.config.solver, Newton)
        ]
        self.start = math.floor((1 - share) * steps)

    def at(self, step: int) -> None:
        """Set the solver for a step, counted from 0."""
        for mechanism, exact in self.switched:
            mechanism.config = exact if step >= self.start else replace(exact, solver=Sinkhorn())

    def restore(self) -> None:
        for mechanism, exact in self.switched:
            mechanism.config = exact

    def reached(self, step: int) -> bool:
        """True if exact solves have had a turn after `step` steps, or there are none to wait for."""
        return step > self.start or not self.switched
