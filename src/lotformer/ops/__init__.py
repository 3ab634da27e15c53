"""The operators. Tensors in, tensors out: no modules, no parameters."""

from .attention import couple, coupling, lot_attention, lot_attention_from_scores, solve_attention
from .beside import join, key_masses, pool, window
from .coupling import Coupling
from .problem import Solve, Transport
from .solution import Solution

__all__ = [
    "Coupling",
    "Solution",
    "Solve",
    "Transport",
    "couple",
    "coupling",
    "join",
    "key_masses",
    "lot_attention",
    "lot_attention_from_scores",
    "pool",
    "solve_attention",
    "window",
]
