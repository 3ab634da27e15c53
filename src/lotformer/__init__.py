"""LOTFormer: linear-time, doubly stochastic attention from low-rank optimal transport."""

from typing import TYPE_CHECKING, Any

from . import _torchvision, _transformers_hook, attention
from ._import_hook import when_imported
from .attention.config import LOTConfig
from .layers import AttentionLayer, LOTAttention
from .nn import PivotMeasure, no_weight_decay
from .ops import Coupling, coupling, lot_attention, lot_attention_from_scores

if TYPE_CHECKING:
    from .conversion import calibrate, convert, finetune, fold, revert

__version__ = "0.1.0"

__all__ = [
    "AttentionLayer",
    "Coupling",
    "LOTAttention",
    "LOTConfig",
    "PivotMeasure",
    "__version__",
    "attention",
    "calibrate",
    "convert",
    "coupling",
    "finetune",
    "fold",
    "lot_attention",
    "lot_attention_from_scores",
    "no_weight_decay",
    "revert",
]

_LAZY = frozenset({"calibrate", "convert", "finetune", "fold", "revert"})

when_imported("torchvision", before=_torchvision.prepare)
_transformers_hook.install()


def __getattr__(name: str) -> Any:
    """Conversion is imported when it is used: most users of the operator never need it."""
    if name in _LAZY:
        from . import conversion

        return getattr(conversion, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(globals().keys() | _LAZY)
