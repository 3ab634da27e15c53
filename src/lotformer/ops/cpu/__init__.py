"""The fused CPU kernel: C++, forward and backward, chosen at run time for the instruction set of the machine."""

from .joining import can_join, join
from .op import instruction_sets, run, sum_to_one, why_unavailable, why_unsupported
from .pooling import can_pool, pool

__all__ = [
    "can_join",
    "can_pool",
    "instruction_sets",
    "join",
    "pool",
    "run",
    "sum_to_one",
    "why_unavailable",
    "why_unsupported",
]
