"""The fused CPU kernels: C++, forward and backward, chosen at run time for the instruction set of the machine.

A module per operator, with `run` and `why_unsupported`: the column "cpu" of the table in `backends`.
"""

from . import found, joining, masses, near, op, pooling
from .op import instruction_sets, sum_to_one
from .operators import why_unavailable

__all__ = ["found", "instruction_sets", "joining", "masses", "near", "op", "pooling", "sum_to_one", "why_unavailable"]
