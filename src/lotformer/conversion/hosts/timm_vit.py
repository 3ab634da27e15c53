"""timm's vision transformers: the `Attention` layer of ViT, DeiT and most of their relatives, and the rotary ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, cast

import torch
from timm.layers.attention import Attention as TimmAttention
from torch import Tensor, nn

from ...attention.folded import split_tokens
from ...attention.unformed import Projections
from ...data.batches import Batch
from ...layers import value_rows
from .base import Host
from .sites import is_folded, mix, relative_scale
from .timm_rotary import AttentionRope, ConvertedAttentionRope, ConvertedEvaAttention, EvaAttention


class ConvertedTimmAttention(TimmAttention):
    """timm's attention layer whose middle is a mechanism; everything else, names included, is unchanged."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        if is_causal:
            raise ValueError("this attention was converted and cannot attend causally; convert without it.")
        batch, length, _ = x.shape
        if is_folded(self):
            v = self.qkv(x).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
            q = k = split_tokens(x, self.head_dim)
        else:
            q, k, v = self.qkv(x).view(batch, length, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
            q, k = self.q_norm(q), self.k_norm(k)
        out = mix(self, q, k, v, attn_mask, self.scale)
        out = self.norm(out.transpose(1, 2).reshape(batch, length, self.num_heads * self.head_dim))
        gate: nn.Module | None = getattr(self, "gate", None)
        if gate is not None:
            out = out * gate(x).sigmoid()
        return self.proj_drop(self.proj(out))


class Timm(Host):
    """timm's vision transformers."""

    name = "timm_vit"
    classes: ClassVar[Mapping[type[nn.Module], type[nn.Module]]] = {
        TimmAttention: ConvertedTimmAttention,
        AttentionRope: ConvertedAttentionRope,
        EvaAttention: ConvertedEvaAttention,
    }

    def is_attention(self, module: nn.Module) -> bool:
        kind = type(module)
        return super().is_attention(module) or (kind.__module__.startswith("timm.") and "Attention" in kind.__name__)

    def heads(self, module: nn.Module) -> tuple[int, int]:
        return cast(int, module.num_heads), cast(int, module.head_dim)

    def why_not(self, model: nn.Module, name: str, module: nn.Module) -> str | None:
        if super().is_attention(module):
            return super().why_not(model, name, module)
        if any("relative_position" in part or "rel_pos" in part for part in dict(module.named_parameters())):
            return "it adds a position bias to its scores"
        return "only timm's Attention, AttentionRope and EvaAttention (ViT, DeiT, EVA and relatives) are converted"

    def projections(self, module: nn.Module, num_heads: int, head_dim: int) -> Projections | str:
        """The first two thirds of `qkv`."""
        if not isinstance(module, TimmAttention):
            return "queries and keys are turned by their positions, so their scores are not linear in the input"
        qkv, norms = module.qkv, (module.q_norm, module.k_norm)
        if type(qkv) is not nn.Linear:
            return f"its projection is a {type(qkv).__name__}, not a plain linear map"
        if not all(isinstance(norm, nn.Identity) for norm in norms):
            return "queries and keys are normalised, so their scores are not linear in the input"
        return Projections.of(qkv.weight, qkv.bias, num_heads, head_dim, relative_scale(module.scale, head_dim))

    def drop_projections(self, module: nn.Module) -> None:
        """`qkv` makes values alone."""
        assert isinstance(module.qkv, nn.Linear)
        module.qkv = value_rows(module.qkv)

    def special_tokens(self, enclosure: nn.Module) -> int | None:
        told = getattr(enclosure, "num_prefix_tokens", None)
        return told if isinstance(told, int) else None

    def sample_inputs(self, model: nn.Module) -> Batch | None:
        size = (getattr(model, "pretrained_cfg", None) or {}).get("input_size")
        if size is None:
            return None
        patches = getattr(getattr(model, "patch_embed", None), "img_size", None)
        shape = (2, size[0], *(patches or size[1:]))
        return torch.randn(shape, generator=torch.Generator().manual_seed(0))
