"""The operator. Tensors in, tensors out: no modules, no parameters."""

from .attention import coupling, lot_attention
from .coupling import Coupling

__all__ = ["Coupling", "coupling", "lot_attention"]
