"""What mechanisms share: the pivot measure, key masses, prefix rows, local mixing, feature maps, linear attention."""

from .depthwise import DepthwiseMixing
from .key_masses import KeyMasses
from .linear import linear_attention
from .pivots import PivotMeasure
from .prefix import PrefixRows

__all__ = ["DepthwiseMixing", "KeyMasses", "PivotMeasure", "PrefixRows", "linear_attention"]
