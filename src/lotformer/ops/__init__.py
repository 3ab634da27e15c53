"""The operators. Tensors in, tensors out: no modules, no parameters."""

from .attention import coupling, lot_attention, lot_attention_from_scores
from .beside import join, key_masses, pool, window
from .coupling import Coupling

__all__ = [
    "Coupling",
    "coupling",
    "join",
    "key_masses",
    "lot_attention",
    "lot_attention_from_scores",
    "pool",
    "window",
]
