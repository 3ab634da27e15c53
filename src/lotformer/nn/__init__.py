"""What mechanisms share: pivots, key masses, prefix rows, local mixing, feature maps, linear attention."""

from .depthwise import DepthwiseMixing
from .key_masses import KeyMasses
from .linear import linear_attention
from .pivot_pooling import PivotPooling
from .pivots import PivotMeasure
from .prefix import PrefixRows
from .undecayed import Undecayed, no_weight_decay

__all__ = [
    "DepthwiseMixing",
    "KeyMasses",
    "PivotMeasure",
    "PivotPooling",
    "PrefixRows",
    "Undecayed",
    "linear_attention",
    "no_weight_decay",
]
