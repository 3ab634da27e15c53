"""The operators. Tensors in, tensors out: no modules, no parameters."""

from .attention import couple, coupling, lot_attention, lot_attention_from_scores, solve_attention
from .beside import join, key_masses, pool, window
from .coupling import Coupling
from .found import found_attention
from .found_coupling import found_coupling, found_transport
from .plain import Found, Grouping, Reach
from .problem import Solve, Transport
from .solution import Solution

__all__ = [
    "Coupling",
    "Found",
    "Grouping",
    "Reach",
    "Solution",
    "Solve",
    "Transport",
    "couple",
    "coupling",
    "found_attention",
    "found_coupling",
    "found_transport",
    "join",
    "key_masses",
    "lot_attention",
    "lot_attention_from_scores",
    "pool",
    "solve_attention",
    "window",
]
