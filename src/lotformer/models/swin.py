"""Swin with linear attention over the whole map in its early stages; timm's SwinTransformer otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, named_apply, register_model
from timm.models.swin_transformer import SwinTransformer, SwinTransformerBlock, checkpoint_filter_fn
from timm.models.vision_transformer import get_init_weights_vit
from torch import Tensor, nn

from ..nn.undecayed import undecayed_names
from .slot import ImageAttention, image_attention


class WholeMapBlock(SwinTransformerBlock):
    """The parts of a Swin block around attention over all tokens of the map `(B, H, W, C)`: no windows, no shift."""

    def __init__(self, block: SwinTransformerBlock, attn: ImageAttention) -> None:
        nn.Module.__init__(self)
        self.input_resolution = block.input_resolution
        self.norm1, self.norm2, self.mlp = block.norm1, block.norm2, block.mlp
        self.drop_path1, self.drop_path2 = block.drop_path1, block.drop_path2
        self.attn: nn.Module = attn  # type: ignore[assignment]  # timm has a window here

    def _attn(self, x: Tensor) -> Tensor:
        return self.attn(x.flatten(1, 2), grid=(x.shape[1], x.shape[2])).reshape(x.shape)

    def set_input_size(self, feat_size: tuple[int, int], *_: Any, **__: Any) -> None:
        self.input_resolution = feat_size

    def reset_parameters(self) -> None:
        """Its parts reset themselves; there is no mask of shifted windows to fill."""

    init_non_persistent_buffers = reset_parameters


class LOTSwinTransformer(SwinTransformer):
    """timm's `SwinTransformer` with a mechanism over the whole map in its first stages.

    As in FLatten and PolaFormer ("LLSS"): the early maps, where windows see least, are mixed whole in linear time;
    later stages keep Swin's shifted windows of softmax attention. With `attention="softmax"` all of them do.

    Args:
        map_stages: how many stages mix the whole map: by default 2, and with softmax none.
        attention, attention_options: as in `lotformer.models`.
    """

    def __init__(
        self,
        *args: Any,
        attention: str = "lot",
        attention_options: Mapping[str, Any] | None = None,
        map_stages: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if map_stages is None:
            map_stages = 0 if attention == "softmax" else 2
        if not 0 <= map_stages <= self.num_layers:
            raise ValueError(f"map_stages must be between 0 and {self.num_layers}, got {map_stages}.")
        words = {
            "qkv_bias": kwargs.get("qkv_bias", True),
            "attn_drop": kwargs.get("attn_drop_rate", 0.0),
            "proj_drop": kwargs.get("proj_drop_rate", 0.0),
            "device": kwargs.get("device"),
            "dtype": kwargs.get("dtype"),
        }
        stages: list[Any] = list(self.layers)
        for stage in stages[:map_stages]:
            slot = image_attention(attention, attention_options, grid=stage.blocks[0].input_resolution)
            for index, block in enumerate(stage.blocks):
                attn = slot(block.dim, num_heads=block.attn.num_heads, **words)
                named_apply(get_init_weights_vit(self.weight_init_mode, needs_reset=False), attn)
                stage.blocks[index] = WholeMapBlock(block, attn)

    def no_weight_decay(self) -> set[str]:
        return super().no_weight_decay() | undecayed_names(self)


default_cfgs = generate_default_cfgs(
    {
        "lot_swin_tiny.untrained": {
            "url": "",
            "num_classes": 1000,
            "input_size": (3, 224, 224),
            "pool_size": (7, 7),
            "crop_pct": 0.9,
            "interpolation": "bicubic",
            "fixed_input_size": True,
            "mean": IMAGENET_DEFAULT_MEAN,
            "std": IMAGENET_DEFAULT_STD,
            "first_conv": "patch_embed.proj",
            "classifier": "head.fc",
        }
    }
)


@register_model
def lot_swin_tiny(pretrained: bool = False, **kwargs: Any) -> SwinTransformer:
    """Swin-Tiny: stages of 2, 2, 6, 2 blocks, the first two over the whole map, the others in windows of 7."""
    size = {"patch_size": 4, "window_size": 7, "embed_dim": 96, "depths": (2, 2, 6, 2), "num_heads": (3, 6, 12, 24)}
    return build_model_with_cfg(
        LOTSwinTransformer,
        "lot_swin_tiny",
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"flatten_sequential": True, "out_indices": kwargs.pop("out_indices", (0, 1, 2, 3))},
        **{**size, **kwargs},
    )
