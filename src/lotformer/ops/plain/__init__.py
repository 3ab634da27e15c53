"""Definitions of the operators beside the transport, in plain PyTorch; that of the transport is `reference`.

Each takes the arguments of its function in `beside`, and every backend has to agree with it.
"""

from .joining import join
from .masses import key_masses
from .pooling import pool
from .window import Reach, read_window

__all__ = ["Reach", "join", "key_masses", "pool", "read_window"]
