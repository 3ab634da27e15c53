"""Block sizes of the programs, and whether one takes a whole head.

Two strategies. "fused" runs all sweeps of a head in one program: forward is one launch (Newton: five), backward six
(Newton: eight), whatever the number of sweeps. "passes" takes a launch for every pass and serves any length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton

Strategy = Literal["fused", "passes"]
Options = dict[str, int]

FUSED_TILE = 8192
"""Scores a program may hold: 32 registers a thread for each tile alive."""

FUSED_RANK = 64  # above, a program per head would spill
NEWTON_RANK = 32  # the same for the exact solve
BLOCK_K = 16


def strategy_for(n: int, m: int, rank: int) -> Strategy:
    """Fused if every score of a head fits on chip."""
    fits = rank <= FUSED_RANK and block(max(n, m)) * block(rank) <= FUSED_TILE
    return "fused" if fits else "passes"


def block(size: int) -> int:
    """A side of a tile that holds so many: Triton takes powers of two, and its products at least 16."""
    return max(16, triton.next_power_of_2(size))


@dataclass(frozen=True)
class Blocks:
    """Block sizes by rank and strategy, chosen so that no kernel spills on any architecture; see `resources`."""

    r: int

    @staticmethod
    def of(rank: int) -> Blocks:
        return Blocks(block(rank))

    @property
    def n(self) -> int:
        return max(16, min(32, 2048 // self.r))

    @property
    def options(self) -> Options:
        options = {"num_warps": 8, "num_stages": 1}
        # left alone, NVIDIA's assembler spills a few bytes to run more programs side by side
        return options if torch.version.hip else {**options, "maxnreg": 255}

    def d(self, depth: int) -> int:
        """The part of the depth that a program sums at once."""
        return max(32, min(block(depth), 2048 // self.r))
