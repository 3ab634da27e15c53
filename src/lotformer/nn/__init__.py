"""Parts shared by mechanisms: pivots, key masses, prefix rows, windows, local mixing, feature maps, linear maps."""

from .depthwise import DepthwiseMixing
from .key_masses import KeyMasses
from .linear import linear_attention
from .near_keys import NearKeys
from .pivot_pooling import PivotPooling
from .pivots import PivotMeasure
from .prefix import PrefixRows
from .undecayed import Undecayed, no_weight_decay

__all__ = [
    "DepthwiseMixing",
    "KeyMasses",
    "NearKeys",
    "PivotMeasure",
    "PivotPooling",
    "PrefixRows",
    "Undecayed",
    "linear_attention",
    "no_weight_decay",
]
