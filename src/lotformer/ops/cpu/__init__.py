"""The fused CPU kernel: C++, forward and backward, chosen at run time for the instruction set of the machine."""

from .masses import can_weigh_keys, key_masses
from .near import Reach, can_read_near_keys, read_near_keys
from .op import instruction_sets, run, sum_to_one, why_unavailable, why_unsupported

__all__ = [
    "Reach",
    "can_read_near_keys",
    "can_weigh_keys",
    "instruction_sets",
    "key_masses",
    "read_near_keys",
    "run",
    "sum_to_one",
    "why_unavailable",
    "why_unsupported",
]
