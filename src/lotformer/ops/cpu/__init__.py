"""The fused CPU kernels: C++, forward and backward, chosen at run time for the instruction set of the machine."""

from .joining import can_join, join
from .masses import can_weigh_keys, key_masses
from .near import Reach, can_read_near_keys, read_near_keys
from .op import instruction_sets, run, sum_to_one, why_unavailable, why_unsupported
from .pooling import can_pool, pool

__all__ = [
    "Reach",
    "can_join",
    "can_pool",
    "can_read_near_keys",
    "can_weigh_keys",
    "instruction_sets",
    "join",
    "key_masses",
    "pool",
    "read_near_keys",
    "run",
    "sum_to_one",
    "why_unavailable",
    "why_unsupported",
]
