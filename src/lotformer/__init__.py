"""LOTFormer: linear-time, doubly stochastic attention from low-rank optimal transport."""

from .ops import Coupling, coupling, lot_attention

__version__ = "0.1.0"

__all__ = ["Coupling", "__version__", "coupling", "lot_attention"]
