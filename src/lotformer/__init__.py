"""LOTFormer: linear-time, doubly stochastic attention from low-rank optimal transport."""

from . import attention
from .layers import AttentionLayer, LOTAttention
from .nn import PivotMeasure
from .ops import Coupling, coupling, lot_attention

__version__ = "0.1.0"

__all__ = [
    "AttentionLayer",
    "Coupling",
    "LOTAttention",
    "PivotMeasure",
    "__version__",
    "attention",
    "coupling",
    "lot_attention",
]
