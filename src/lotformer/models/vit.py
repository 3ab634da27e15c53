"""DeiT and the ablations' small ViT: timm's VisionTransformer with our attention in its slot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import nn

from ..nn.grids import GridSource, needs_grid
from ..nn.undecayed import undecayed_names
from .slot import ImageAttention, image_attention

if TYPE_CHECKING:
    _Base = VisionTransformer
else:
    _Base = object


class _AttentionByName(_Base):
    """Puts a mechanism into a ViT's blocks and lets them read the grid of the patches."""

    def __init__(
        self,
        *args: Any,
        attention: str = "lot",
        attention_options: Mapping[str, Any] | None = None,
        softmax_prefix: bool = True,
        **kwargs: Any,
    ) -> None:
        slot = image_attention(
            attention,
            attention_options,
            special_tokens=self._special_tokens(kwargs),
            softmax_prefix=softmax_prefix,
            grid=lambda: self.patch_embed.grid_size,  # which is there by the time a block is built
        )
        super().__init__(*args, **{**kwargs, "attn_layer": slot})
        self._supply_grid()

    @staticmethod
    def _special_tokens(kwargs: Mapping[str, Any]) -> int:
        return int(kwargs.get("class_token", True)) + int(kwargs.get("reg_tokens", 0))

    def _supply_grid(self) -> None:
        *_, patches = (module for module in self.patch_embed.modules() if isinstance(module, nn.Conv2d))
        source = GridSource(self.num_prefix_tokens)
        for name, layer in self.named_modules():
            if isinstance(layer, ImageAttention) and needs_grid(layer.mechanism):
                layer.grids = source
                source.supply(self, patches, name)

    def no_weight_decay(self) -> set[str]:
        return super().no_weight_decay() | undecayed_names(self)


class LOTVisionTransformer(_AttentionByName, VisionTransformer):
    """timm's `VisionTransformer` with a mechanism by name; `lotformer.models` lists the arguments it adds."""


class LOTVisionTransformerDistilled(_AttentionByName, VisionTransformerDistilled):
    """timm's DeiT with a distillation token; it counts as a special token like [CLS]."""

    @staticmethod
    def _special_tokens(kwargs: Mapping[str, Any]) -> int:
        return 2


def _cfg(**kwargs: Any) -> dict[str, Any]:
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "fixed_input_size": True,
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        **kwargs,
    }


_DISTILLED = {"classifier": ("head", "head_dist")}
default_cfgs = generate_default_cfgs(
    {
        "lot_deit_tiny_patch16_224.untrained": _cfg(),
        "lot_deit_small_patch16_224.untrained": _cfg(),
        "lot_deit_base_patch16_224.untrained": _cfg(),
        "lot_deit_tiny_distilled_patch16_224.untrained": _cfg(**_DISTILLED),
        "lot_deit_small_distilled_patch16_224.untrained": _cfg(**_DISTILLED),
        "lot_deit_base_distilled_patch16_224.untrained": _cfg(**_DISTILLED),
        "lot_vit_half.untrained": _cfg(),
    }
)


def _create(variant: str, pretrained: bool, size: dict[str, int], kwargs: dict[str, Any]) -> VisionTransformer:
    return build_model_with_cfg(
        LOTVisionTransformerDistilled if "distilled" in variant else LOTVisionTransformer,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": kwargs.pop("out_indices", 3), "feature_cls": "getter"},
        **{"patch_size": 16, "depth": 12, **size, **kwargs},
    )


_TINY = {"embed_dim": 192, "num_heads": 3}
_SMALL = {"embed_dim": 384, "num_heads": 6}
_BASE = {"embed_dim": 768, "num_heads": 12}
_HALF = {"embed_dim": 96, "num_heads": 3}


@register_model
def lot_deit_tiny_patch16_224(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """DeiT-Tiny: 12 blocks, width 192, 3 heads."""
    return _create("lot_deit_tiny_patch16_224", pretrained, _TINY, kwargs)


@register_model
def lot_deit_small_patch16_224(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """DeiT-Small: 12 blocks, width 384, 6 heads."""
    return _create("lot_deit_small_patch16_224", pretrained, _SMALL, kwargs)


@register_model
def lot_deit_base_patch16_224(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """DeiT-Base: 12 blocks, width 768, 12 heads."""
    return _create("lot_deit_base_patch16_224", pretrained, _BASE, kwargs)


@register_model
def lot_deit_tiny_distilled_patch16_224(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """DeiT-Tiny with a distillation token."""
    return _create("lot_deit_tiny_distilled_patch16_224", pretrained, _TINY, kwargs)


@register_model
def lot_deit_small_distilled_patch16_224(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """DeiT-Small with a distillation token."""
    return _create("lot_deit_small_distilled_patch16_224", pretrained, _SMALL, kwargs)


@register_model
def lot_deit_base_distilled_patch16_224(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """DeiT-Base with a distillation token."""
    return _create("lot_deit_base_distilled_patch16_224", pretrained, _BASE, kwargs)


@register_model
def lot_vit_half(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """The ablations' ViT at half the hidden width: DeiT-Tiny with 96 channels in 3 heads.

    The paper does not name the ViT that it halves; DeiT-Tiny is the host of its other ablations. `embed_dim=384,
    num_heads=6` is half of ViT-Base.
    """
    return _create("lot_vit_half", pretrained, _HALF, kwargs)
