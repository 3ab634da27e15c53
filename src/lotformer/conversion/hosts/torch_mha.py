"""`torch.nn.MultiheadAttention`, alone or inside `nn.TransformerEncoder` and `nn.Transformer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...attention.folded import split_tokens
from ...attention.host_masks import additive_allows
from ...attention.unformed import Projections
from ...data.batches import Batch
from . import names
from .base import Host
from .sites import is_folded, mix, record_of

_NESTED = "_lotformer_use_nested_tensor"


class ConvertedMultiheadAttention(nn.MultiheadAttention):
    """A `MultiheadAttention` whose middle is a mechanism; projections, names and arguments are unchanged.

    It serves self-attention only, and returns None for the attention weights, which are never formed.
    """

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """False keeps `TransformerEncoderLayer`'s fast path, which reads the weights and runs softmax, away."""
        return False

    @_qkv_same_embed_dim.setter
    def _qkv_same_embed_dim(self, value: bool) -> None:
        self.__dict__["_qkv_same_embed_dim"] = value

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        if is_causal:
            raise ValueError("this MultiheadAttention was converted and cannot attend causally; convert without it.")
        if key is not query or value is not query:
            raise ValueError(
                "this MultiheadAttention was converted for self-attention, but key or value is not the query. "
                "Leave cross-attention out with `layers=`."
            )
        single = query.dim() == 2
        x = query[None] if single else query if self.batch_first else query.transpose(0, 1)
        batch, length, width = x.shape
        weight, bias = self.in_proj_weight, self.in_proj_bias
        assert weight is not None
        made = F.linear(x, weight, bias).view(batch, length, -1, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q = k = split_tokens(x, self.head_dim)
        if not is_folded(self):
            q, k = made[0], made[1]
        mask = _real_keys(attn_mask, key_padding_mask, batch, length)
        out = mix(self, q, k, made[-1], mask)
        out = self.out_proj(out.transpose(1, 2).reshape(batch, length, width))
        return (out[0] if single else out if self.batch_first else out.transpose(0, 1)), None


class Torch(Host):
    """Plain PyTorch: `MultiheadAttention`, and the names that vision transformers share."""

    name = "torch_mha"
    classes: ClassVar[Mapping[type[nn.Module], type[nn.Module]]] = {nn.MultiheadAttention: ConvertedMultiheadAttention}
    inside_others = "a MultiheadAttention inside another library's model; name it to convert it"

    def heads(self, module: nn.Module) -> tuple[int, int]:
        assert isinstance(module, nn.MultiheadAttention)
        return module.num_heads, module.head_dim

    def is_causal(self, model: nn.Module, name: str, module: nn.Module) -> bool:
        """In a decoder it is, or it is cross-attention."""
        layers = (layer for layer in model.modules() if isinstance(layer, nn.TransformerDecoderLayer))
        return any(part is module for layer in layers for part in layer.modules())

    def why_not(self, model: nn.Module, name: str, module: nn.Module) -> str | None:
        assert isinstance(module, nn.MultiheadAttention)
        if self.is_causal(model, name, module):
            return "it belongs to a decoder: causal self-attention or cross-attention"
        if not module.__dict__["_qkv_same_embed_dim"]:
            return "its keys or values have a width of their own: it is cross-attention"
        if module.bias_k is not None or module.add_zero_attn:
            return "it adds tokens of its own to the keys (add_bias_kv, add_zero_attn)"
        return None

    def attach(self, model: nn.Module, modules: list[nn.Module]) -> None:
        super().attach(model, modules)
        for module in model.modules():
            if isinstance(module, nn.TransformerEncoder) and any(map(record_of, module.modules())):
                module.__dict__.setdefault(_NESTED, module.use_nested_tensor)
                module.use_nested_tensor = False  # packing drops padding before the mask could be read

    def detach(self, model: nn.Module, modules: list[nn.Module]) -> None:
        super().detach(model, modules)
        for module in model.modules():
            if _NESTED in module.__dict__ and not any(map(record_of, module.modules())):
                module.use_nested_tensor = module.__dict__.pop(_NESTED)

    def projections(self, module: nn.Module, num_heads: int, head_dim: int) -> Projections | str:
        """The first two thirds of `in_proj_weight`."""
        assert isinstance(module, nn.MultiheadAttention)
        assert module.in_proj_weight is not None
        return Projections.of(module.in_proj_weight, module.in_proj_bias, num_heads, head_dim)

    def drop_projections(self, module: nn.Module) -> None:
        """The projection makes values alone."""
        assert isinstance(module, nn.MultiheadAttention)
        for name in ("in_proj_weight", "in_proj_bias"):
            whole = getattr(module, name)
            if whole is not None:
                values = whole.detach()[-module.embed_dim :].clone()
                setattr(module, name, nn.Parameter(values, requires_grad=whole.requires_grad))

    def special_tokens(self, enclosure: nn.Module) -> int | None:
        return names.special_tokens(enclosure)

    def patches(self, enclosure: nn.Module) -> nn.Module | None:
        return names.patches(enclosure)

    def sample_inputs(self, model: nn.Module) -> Batch | None:
        if not isinstance(model, nn.TransformerEncoder):
            return None
        width = model.layers[0].self_attn.embed_dim
        return torch.randn(2, 16, width, generator=torch.Generator().manual_seed(0))


def _real_keys(attn_mask: Tensor | None, padding: Tensor | None, batch: int, length: int) -> Tensor | None:
    """PyTorch's two masks as one of the kind `mix` understands; here True or -inf means "not allowed"."""
    allowed = None
    for mask in (attn_mask, padding):
        if mask is None:
            continue
        if mask is padding:
            mask = mask.view(-1, 1, 1, length)
        else:
            mask = mask.view(-1, 1, length, length) if mask.dim() == 2 else mask.view(batch, -1, length, length)
        keep = ~mask if mask.dtype == torch.bool else additive_allows(mask)
        allowed = keep if allowed is None else allowed & keep
    return allowed
