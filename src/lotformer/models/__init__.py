"""Vision models with any mechanism in their attention slots, registered with timm when this package is imported.

    import timm, lotformer.models
    model = timm.create_model("lot_deit_tiny_patch16_224", num_classes=10, img_size=(128, 192))
    model = timm.create_model("lot_deit_tiny_patch16_224", attention="polaformer")

`lot_deit_{tiny,small,base}_patch16_224`, their `_distilled_` twins, `lot_vit_half`, `lot_swin_tiny` and `lot_pvt_tiny`
all take, beside what the timm class takes:

    attention            the mechanism by its name in `lotformer.attention.names()`; "lot" by default
    attention_options    its own options, over the defaults of `image_attention`; for LOT also `AUTHORS_CODE`
    softmax_prefix       whether special tokens read by softmax while the mechanism mixes the patches; True by default

With `attention="softmax"` they are the original models: timm's DeiT and Swin, and PVT with its reduced keys.
"""

from . import _timm  # noqa: F401  first
from .pvt import PyramidVisionTransformer
from .slot import AUTHORS_CODE, ImageAttention, image_attention
from .swin import LOTSwinTransformer
from .vit import LOTVisionTransformer, LOTVisionTransformerDistilled

__all__ = [
    "AUTHORS_CODE",
    "ImageAttention",
    "LOTSwinTransformer",
    "LOTVisionTransformer",
    "LOTVisionTransformerDistilled",
    "PyramidVisionTransformer",
    "image_attention",
]
