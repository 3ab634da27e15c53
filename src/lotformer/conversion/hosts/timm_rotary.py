"""timm's attention with rotary positions: `EvaAttention` (EVA-02, DINOv3, …) and `AttentionRope`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import apply_rot_embed_cat
from timm.layers.attention import AttentionRope
from timm.models.eva import EvaAttention
from torch import Tensor

from .sites import mix


def _attend(layer: Any, x: Tensor, rope: Tensor | None, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    """Project, rotate the tokens after the prefix as the host does, and let the mechanism mix."""
    if is_causal:
        raise ValueError("this attention was converted and cannot attend causally; convert without it.")
    batch, length, _ = x.shape
    q, k, v = (part.view(batch, length, -1, layer.head_dim).transpose(1, 2) for part in _projected(layer, x))
    q, k = layer.q_norm(q), layer.k_norm(k)
    if rope is not None:
        q, k = (_rotated(layer, part, rope).type_as(v) for part in (q, k))
    out = layer.norm(mix(layer, q, k, v, attn_mask, layer.scale).transpose(1, 2).flatten(2))
    if layer.gate is not None:
        out = out * layer.gate(x).sigmoid()
    return layer.proj_drop(layer.proj(out))


def _projected(layer: Any, x: Tensor) -> tuple[Tensor, ...]:
    if layer.qkv is None:
        return layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)
    q_bias = getattr(layer, "q_bias", None)
    if q_bias is None:
        return layer.qkv(x).chunk(3, -1)
    return F.linear(x, layer.qkv.weight, torch.cat((q_bias, layer.k_bias, layer.v_bias))).chunk(3, -1)


def _rotated(layer: Any, x: Tensor, rope: Tensor) -> Tensor:
    prefix = layer.num_prefix_tokens
    turned = apply_rot_embed_cat(x[:, :, prefix:], rope, half=getattr(layer, "rotate_half", False))
    return torch.cat([x[:, :, :prefix], turned], 2)


class ConvertedEvaAttention(EvaAttention):
    """EVA's attention whose middle is a mechanism; everything else, names included, is unchanged."""

    def forward(self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None,
                is_causal: bool = False) -> Tensor:  # fmt: skip
        return _attend(self, x, rope, attn_mask, is_causal)


class ConvertedAttentionRope(AttentionRope):
    """timm's rotary attention whose middle is a mechanism; everything else, names included, is unchanged."""

    def forward(self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None,
                is_causal: bool = False) -> Tensor:  # fmt: skip
        return _attend(self, x, rope, attn_mask, is_causal)
