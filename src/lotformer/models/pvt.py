"""The first Pyramid Vision Transformer, from timm's patch embeddings and transformer blocks.

Wang et al. 2021, Pyramid Vision Transformer: A Versatile Backbone for Dense Prediction without Convolutions. timm has
only its second version. The original shortens the keys by strided convolutions to afford softmax, and so does this one
with `attention="softmax"`: then it is transformers' `PvtForImageClassification`. Linear attention needs no reduction,
and other mechanisms get none, as in FLatten, PolaFormer and the paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import PatchEmbed, calculate_drop_path_rates, resample_abs_pos_embed, trunc_normal_
from timm.models import (
    build_model_with_cfg,
    generate_default_cfgs,
    named_apply,
    register_model,
)
from timm.models._features import feature_take_indices
from timm.models._manipulate import checkpoint
from timm.models.vision_transformer import Block, get_init_weights_vit
from torch import Tensor, nn

from ..nn.undecayed import undecayed_names
from .reduction import ReducedAttention
from .slot import Grid, image_attention

SR_RATIOS = (8, 4, 2, 1)
"""By how much the original shrinks the sides of the map before its tokens become keys."""


class GridBlock(Block):
    """timm's block, which hands the grid of its tokens to the attention."""

    def forward(self, x: Tensor, grid: Grid) -> Tensor:  # type: ignore[override]  # timm has masks here
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), grid=grid)))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class PyramidStage(nn.Module):
    """Patches of the map `(B, C, H, W)`, positions, perhaps a class token, and blocks over all tokens `(B, N, dim)`."""

    def __init__(
        self, *, img_size: tuple[int, int], patch_size: int, in_chans: int, dim: int, class_token: bool, **block: Any
    ) -> None:
        super().__init__()
        norm, rates = block["norm_layer"], block.pop("drop_path")
        self.patch_embed = PatchEmbed(
            img_size, patch_size, in_chans, dim, norm_layer=norm, output_fmt="NHWC", strict_img_size=False
        )
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim)) if class_token else None
        self.pos_embed = nn.Parameter(torch.zeros(1, self.patch_embed.num_patches + class_token, dim))
        self.blocks = nn.ModuleList(GridBlock(dim, qkv_bias=True, drop_path=rate, **block) for rate in rates)
        self.grad_checkpointing = False
        trunc_normal_(self.pos_embed, std=0.02)
        if self.cls_token is not None:
            trunc_normal_(self.cls_token, std=0.02)

    def forward(self, x: Tensor) -> tuple[Tensor, Grid]:
        """The tokens after the blocks, the class token first where there is one, and their grid."""
        x = self.patch_embed(x)
        grid = (x.shape[1], x.shape[2])
        x = x.flatten(1, 2)
        special = 0
        if self.cls_token is not None:
            special = 1
            x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1)
        x = x + resample_abs_pos_embed(self.pos_embed, grid, self.patch_embed.grid_size, num_prefix_tokens=special)
        for block in self.blocks:
            x = checkpoint(block, x, grid) if self.grad_checkpointing else block(x, grid)
        return x, grid


class PyramidVisionTransformer(nn.Module):
    """PVT v1: four stages of shrinking maps, a class token in the last.

    Args:
        attention, attention_options, softmax_prefix: as in `lotformer.models`.
        sr_ratios: reduction of the keys of each stage, for softmax alone: by default the original's, and 1 for other
            mechanisms.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        *,
        embed_dims: Sequence[int] = (64, 128, 320, 512),
        depths: Sequence[int] = (2, 2, 2, 2),
        num_heads: Sequence[int] = (1, 2, 5, 8),
        mlp_ratios: Sequence[float] = (8, 8, 4, 4),
        patch_sizes: Sequence[int] = (4, 2, 2, 2),
        attention: str = "lot",
        attention_options: Mapping[str, Any] | None = None,
        softmax_prefix: bool = True,
        sr_ratios: Sequence[int] | None = None,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        if global_pool not in ("token", ""):
            raise ValueError(f"global_pool must be 'token' or '', got {global_pool!r}.")
        self.num_classes, self.global_pool, self.in_chans = num_classes, global_pool, in_chans
        self.num_features = self.head_hidden_size = embed_dims[-1]
        norm_layer = partial(nn.LayerNorm, eps=1e-6)
        rates = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        size = (img_size, img_size) if isinstance(img_size, int) else img_size
        ratios = _reductions(sr_ratios, attention, len(embed_dims))
        self.feature_info: list[dict[str, Any]] = []
        stages, reduction = [], 1
        for index, (dim, patch_size) in enumerate(zip(embed_dims, patch_sizes, strict=True)):
            last = index == len(embed_dims) - 1
            grid = (size[0] // patch_size, size[1] // patch_size)
            slot: type[nn.Module]
            if ratios[index] > 1:
                slot = ReducedAttention.with_options(ratio=ratios[index], **(attention_options or {}))
            else:
                slot = image_attention(
                    attention,
                    attention_options,
                    special_tokens=int(last),
                    softmax_prefix=softmax_prefix,
                    grid=grid,
                )
            stages.append(
                PyramidStage(
                    img_size=size,
                    patch_size=patch_size,
                    in_chans=embed_dims[index - 1] if index else in_chans,
                    dim=dim,
                    class_token=last,
                    num_heads=num_heads[index],
                    mlp_ratio=mlp_ratios[index],
                    proj_drop=proj_drop_rate,
                    attn_drop=attn_drop_rate,
                    drop_path=rates[index],
                    norm_layer=norm_layer,
                    attn_layer=slot,
                )
            )
            size = grid
            reduction *= patch_size
            self.feature_info.append({"num_chs": dim, "reduction": reduction, "module": f"stages.{index}"})
        self.stages = nn.ModuleList(stages)
        self.norm: nn.Module = norm_layer(embed_dims[-1])
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(embed_dims[-1], num_classes) if num_classes > 0 else nn.Identity()
        named_apply(get_init_weights_vit("", needs_reset=False), self)

    def forward_features(self, x: Tensor) -> Tensor:
        """Normalised tokens of the last stage, `(B, 1 + N, dim)`."""
        for stage in self.stages:
            tokens, grid = stage(x)
            x = tokens if stage.cls_token is not None else _as_map(tokens, grid)
        return self.norm(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.head_drop(x[:, 0] if self.global_pool else x)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """The maps `(B, dim, H, W)` after the chosen stages, and unless told otherwise the final tokens before them."""
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt must be 'NCHW', got {output_fmt!r}.")
        wanted, deepest = feature_take_indices(len(self.stages), indices)
        maps = []
        for index, stage in enumerate(self.stages[: deepest + 1] if stop_early else self.stages):
            tokens, grid = stage(x)
            if stage.cls_token is None:
                x = _as_map(tokens, grid)
            else:
                x = _as_map((self.norm(tokens) if norm else tokens)[:, 1:], grid)
            if index in wanted:
                maps.append(x)
        return maps if intermediates_only else (self.norm(tokens), maps)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what the chosen intermediates do not need."""
        wanted, deepest = feature_take_indices(len(self.stages), indices)
        self.stages = self.stages[: deepest + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0)
        return wanted

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        self.num_classes = num_classes
        self.global_pool = self.global_pool if global_pool is None else global_pool
        self.head = nn.Linear(self.num_features, num_classes) if num_classes > 0 else nn.Identity()

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        for stage in self.stages:
            stage.grad_checkpointing = enable  # type: ignore[assignment]  # nn.Module types its attributes

    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        return {"stem": r"^stages\.0\.patch_embed", "blocks": r"^stages\.(\d+)"}

    def no_weight_decay(self) -> set[str]:
        positions = {name for name, _ in self.named_parameters() if name.endswith(("pos_embed", "cls_token"))}
        return positions | undecayed_names(self)


def _reductions(given: Sequence[int] | None, attention: str, stages: int) -> Sequence[int]:
    """The ratio of each stage, checked."""
    if given is None:
        return SR_RATIOS if attention == "softmax" and stages == len(SR_RATIOS) else (1,) * stages
    if len(given) != stages or given[-1] != 1:
        raise ValueError(
            f"sr_ratios must be one for each of the {stages} stages and end with 1, as the last one has a class token; "
            f"got {tuple(given)}."
        )
    if attention != "softmax" and any(ratio != 1 for ratio in given):
        raise ValueError(f"sr_ratios={tuple(given)}: only softmax attention reduces its keys, not {attention!r}.")
    return given


def _as_map(tokens: Tensor, grid: Grid) -> Tensor:
    return tokens.transpose(1, 2).unflatten(2, grid)


default_cfgs = generate_default_cfgs(
    {
        "lot_pvt_tiny.untrained": {
            "url": "",
            "num_classes": 1000,
            "input_size": (3, 224, 224),
            "pool_size": None,
            "crop_pct": 0.9,
            "interpolation": "bicubic",
            "fixed_input_size": False,
            "mean": IMAGENET_DEFAULT_MEAN,
            "std": IMAGENET_DEFAULT_STD,
            "first_conv": "stages.0.patch_embed.proj",
            "classifier": "head",
        }
    }
)


@register_model
def lot_pvt_tiny(pretrained: bool = False, **kwargs: Any) -> PyramidVisionTransformer:
    """PVT-Tiny: stages of 2 blocks, widths 64, 128, 320, 512."""
    return build_model_with_cfg(
        PyramidVisionTransformer,
        "lot_pvt_tiny",
        pretrained,
        feature_cfg={"out_indices": kwargs.pop("out_indices", (0, 1, 2, 3)), "feature_cls": "getter"},
        **kwargs,
    )
