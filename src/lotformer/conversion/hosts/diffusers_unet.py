"""diffusers: the self-attention of its UNets and transformers, which all run through one `Attention` and a processor.

The processor is what mixes; a converted module has one of ours, and its own is kept beside it.
"""

from __future__ import annotations

from typing import Any, cast

from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0
from torch import Tensor, nn

from ...attention.unformed import Projections
from .base import CAUSAL, Host
from .sites import mix

_PROCESSOR = "_lotformer_processor"


class MechanismProcessor:
    """Replacement of `AttnProcessor2_0` that calls the module's mechanism."""

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
        *_: Any,
        **__: Any,
    ) -> Tensor:
        if encoder_hidden_states is not None and encoder_hidden_states is not hidden_states:
            raise ValueError(
                "this Attention was converted for self-attention, but is asked to read encoder_hidden_states. "
                "Leave it out with `layers=`."
            )
        residual, x, image = hidden_states, hidden_states, hidden_states.shape
        if attn.spatial_norm is not None:
            x = attn.spatial_norm(x, temb)
        if len(image) == 4:
            x = x.flatten(2).transpose(1, 2)
        if attn.group_norm is not None:
            x = attn.group_norm(x.transpose(1, 2)).transpose(1, 2)
        batch, length, _channels = x.shape
        head_dim = attn.inner_dim // attn.heads
        q, k, v = (to(x).view(batch, length, -1, head_dim).transpose(1, 2) for to in (attn.to_q, attn.to_k, attn.to_v))
        q = q if attn.norm_q is None else attn.norm_q(q)
        k = k if attn.norm_k is None else attn.norm_k(k)
        if attention_mask is not None:
            attention_mask = attn.prepare_attention_mask(attention_mask, length, batch)
            attention_mask = attention_mask.view(batch, attn.heads, -1, attention_mask.shape[-1])
        out = mix(attn, q, k, v, attention_mask).transpose(1, 2).flatten(2)
        out = attn.to_out[1](attn.to_out[0](out))
        if len(image) == 4:
            out = out.transpose(1, 2).view(image)
        if attn.residual_connection:
            out = out + residual
        return out / attn.rescale_output_factor


class Diffusers(Host):
    """UNets and transformers of diffusers."""

    name = "diffusers_unet"

    def is_attention(self, module: nn.Module) -> bool:
        return isinstance(module, Attention)

    def heads(self, module: nn.Module) -> tuple[int, int]:
        assert isinstance(module, Attention)
        return module.heads, module.inner_dim // module.heads

    def why_not(self, model: nn.Module, name: str, module: nn.Module) -> str | None:
        assert isinstance(module, Attention)
        if module.is_cross_attention:
            return "it is cross-attention"
        if self.is_causal(model, name, module):
            return CAUSAL
        if module.added_kv_proj_dim is not None:
            return "it reads a second sequence beside its own"
        if type(module.processor) not in (AttnProcessor, AttnProcessor2_0, MechanismProcessor):
            return f"its {type(module.processor).__name__} mixes in a way of its own"
        return None

    def attach(self, model: nn.Module, modules: list[nn.Module]) -> None:
        for module in modules:
            assert isinstance(module, Attention)
            if not isinstance(module.processor, MechanismProcessor):
                module.__dict__[_PROCESSOR] = module.processor
                module.set_processor(cast(Any, MechanismProcessor()))  # it need not be of their class

    def detach(self, model: nn.Module, modules: list[nn.Module]) -> None:
        for module in modules:
            assert isinstance(module, Attention)
            module.set_processor(module.__dict__.pop(_PROCESSOR))

    def projections(self, module: nn.Module, num_heads: int, head_dim: int) -> Projections | str:
        return "diffusers may put adapters and norms around its projections"
