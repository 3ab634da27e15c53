"""The operator. Tensors in, tensors out: no modules, no parameters."""

from .attention import coupling, lot_attention, lot_attention_from_scores
from .coupling import Coupling

__all__ = ["Coupling", "coupling", "lot_attention", "lot_attention_from_scores"]
