"""What mechanisms share: the pivot measure, key masses, prefix rows, local mixing."""

from .depthwise import DepthwiseMixing
from .key_masses import KeyMasses
from .pivots import PivotMeasure
from .prefix import PrefixRows

__all__ = ["DepthwiseMixing", "KeyMasses", "PivotMeasure", "PrefixRows"]
