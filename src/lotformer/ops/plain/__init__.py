"""Definitions of the operators beside the transport, in plain PyTorch; that of the transport is `reference`.

Each takes the arguments of its function in `beside`, and every backend has to agree with it.
"""

from .found import Found, Grouping
from .found import attend as read_groups
from .groups import find_groups
from .joining import join
from .masses import key_masses
from .pooling import pool
from .window import Reach, read_window

__all__ = ["Found", "Grouping", "Reach", "find_groups", "join", "key_masses", "pool", "read_groups", "read_window"]
