"""Hugging Face models: attention that dispatches through `AttentionInterface`.

A converted module keeps its projections and gains a `mechanism`; its config says `_attn_implementation = "lot"`,
so transformers' own dispatch calls `attention_forward` below. What the configs of a model say is `configs.settle`'s
business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

from ...attention.unformed import Projections
from . import configs
from .configs import IMPLEMENTATION, SAVED, dispatches, names_in_forward
from .sites import MECHANISM, Site, Skipped, mix, relative_scale


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in place of softmax attention; returns `(B, N, H, D)` and no weights.

    The host's attention dropout is not applied: it drops entries of a matrix that is never formed. Mechanisms have
    their own `dropout` option.
    """
    if not hasattr(module, MECHANISM):
        raise RuntimeError(
            f"attn_implementation={IMPLEMENTATION!r} is set, but {type(module).__name__} holds no mechanism. Call "
            f"`lotformer.convert(model)` or load with `from_pretrained(..., attn_implementation={IMPLEMENTATION!r})`."
        )
    asked = configs.implementation_of_the_model(module)
    if asked not in (IMPLEMENTATION, SAVED):
        raise RuntimeError(
            f"attn_implementation={asked!r} was set on a converted model, whose attention is not softmax. "
            f"Call `lotformer.revert(model)` first, or set it back to {IMPLEMENTATION!r}."
        )
    if is_causal or sliding_window is not None:
        kind = "causally" if is_causal else f"within a window of {sliding_window}"
        raise ValueError(f"{type(module).__name__} was converted but is asked to attend {kind}; convert without it.")
    return mix(module, query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = bidirectional_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """What transformers calls to make the mask of converted layers: `(B, M)` where padding is all there is to say."""
    if mask_function is not bidirectional_mask_function:
        return sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **kwargs
        )  # the layers will refuse it with a reason
    if attention_mask is None:
        return None
    mask = attention_mask[:, -kv_length:].bool()
    if mask.device.type == "cpu" and not torch.compiler.is_compiling() and bool(mask.all()):
        return None
    return mask


def register() -> None:
    """Make the names of our attention known to transformers, by its own interface."""
    for name in (IMPLEMENTATION, SAVED):
        AttentionInterface.register(name, attention_forward)
        AttentionMaskInterface.register(name, padding_mask)


def find(model: nn.Module) -> list[Site | Skipped]:
    """Every attention module of the Hugging Face kind in the model."""
    return [_classify(model, name, module) for name, module in model.named_modules() if _is_attention(module)]


def attach(model: nn.Module, modules: list[nn.Module]) -> None:
    """Let transformers dispatch to the mechanisms."""
    configs.settle(model)


def detach(model: nn.Module, modules: list[nn.Module]) -> None:
    """Let transformers dispatch as before."""
    configs.settle(model)


_QUERY_AND_KEY = (("query", "key"), ("q_proj", "k_proj"), ("q_lin", "k_lin"))
_CROSS = ("encoder_attn", "crossattention", "cross_attn", "encoder_attention", "cross_attention")
_NOT_LINEAR = ("rotary", "norm")


def projections(module: nn.Module, num_heads: int, head_dim: int) -> Projections | str:
    """The query and key projections of a module, if nothing but a view stands between them and the attention."""
    changed = [name for name in names_in_forward(module) if any(part in name for part in _NOT_LINEAR)]
    if changed:
        return f"{changed[0]} comes between its projections and its scores, which are not linear in the input then"
    names = _projection_names(module)
    if names is None:
        return "its query and key projections are not linear maps of their own"
    query, key = (getattr(module, name) for name in names)
    if query.weight.shape != key.weight.shape or query.in_features % head_dim:
        return "its queries and keys are not as wide as its input, or not as many"
    biases = [x.weight.new_zeros(len(x.weight)) if x.bias is None else x.bias for x in (query, key)]
    factor = relative_scale(getattr(module, "scaling", None), head_dim)
    return Projections.of(torch.cat([query.weight, key.weight]), torch.cat(biases), num_heads, head_dim, factor)


def drop_projections(module: nn.Module) -> None:
    """Identities hand the input through, and the module cuts it into heads as it would cut queries and keys."""
    for name in _projection_names(module) or ():
        setattr(module, name, nn.Identity())


def _projection_names(module: nn.Module) -> tuple[str, str] | None:
    for names in _QUERY_AND_KEY:
        if all(type(getattr(module, name, None)) is nn.Linear for name in names):
            return names
    return None


def _is_attention(module: nn.Module) -> bool:
    if dispatches(module):
        return True
    home = type(module).__module__
    return home.startswith("transformers.models.") and type(module).__name__.endswith("SelfAttention")


def _classify(model: nn.Module, name: str, module: nn.Module) -> Site | Skipped:
    kind = type(module).__name__
    heads = _first(module, "num_attention_heads", "num_heads", "n_heads", "n_head")
    dim = _first(module, "attention_head_size", "head_dim", "attention_head_dim")
    if dim is None and heads is not None:
        width = _first(module, "all_head_size", "embed_dim", "hidden_size", "dim")
        dim = None if width is None else width // heads
    if not dispatches(module):
        reason = "it computes its own scores, outside AttentionInterface"
    elif _is_cross_attention(name, kind, module):  # first: decoders' say that they are causal, which they are not
        reason = "it is cross-attention"
    elif getattr(module, "is_causal", False) or _in_causal_tower(model, name):
        reason = "it is causal, and a causal doubly stochastic matrix is the identity"
    elif getattr(module, "is_decoder", False):
        reason = "it belongs to a decoder"
    elif _has_position_bias(module):
        reason = "it adds a position bias to its scores"
    elif getattr(module, "sliding_window", None) is not None:
        reason = f"it attends within a window of {module.sliding_window}"
    elif heads is None or dim is None:
        reason = "its heads could not be read from its attributes"
    else:
        return Site(name, module, heads, dim)
    return Skipped(name, module, reason)


def _is_cross_attention(name: str, kind: str, module: nn.Module) -> bool:
    if "CrossAttention" in kind or getattr(module, "is_cross_attention", False):
        return True
    return name.rpartition(".")[2] in _CROSS


def _in_causal_tower(model: nn.Module, name: str) -> bool:
    """Whether the mask that reaches a module is causal though the module does not say so (the text half of CLIP).

    Masks are made in the `forward` of an enclosing model. The nearest one that makes any decides; one that makes both
    kinds leaves the choice to attributes that the modules carry.
    """
    while name:
        name = name.rpartition(".")[0]
        made = {part for part in names_in_forward(model.get_submodule(name)) if part.endswith("_mask")}
        causal = any("causal" in part for part in made)
        if causal or any("bidirectional" in part or "attention_mask" in part for part in made):
            return causal and not any("bidirectional" in part or "extended" in part for part in made)
    return False


def _first(module: nn.Module, *names: str) -> int | None:
    for place in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(place, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def _has_position_bias(module: nn.Module) -> bool:
    names = [*module.__dict__, *(name for name, _ in module.named_children()), *dict(module.named_parameters())]
    return any("relative" in name and "bias" in name for name in names)


from .. import pretrained  # noqa: E402, F401  registers; it needs this module, which may be imported first
