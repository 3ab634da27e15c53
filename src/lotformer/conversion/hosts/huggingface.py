"""Hugging Face models: attention that dispatches through `AttentionInterface`.

A converted module keeps its projections and gains a `mechanism`; its config says `_attn_implementation = "lot"`,
so transformers' own dispatch calls `attention_forward` below. Wherever every attention under a sub-model is converted,
that sub-model's config says so too, and `padding_mask` hands the layers a `(B, M)` mask instead of an N×N one.
Configs are copied before they are changed: decoders and other unconverted parts that share one are not affected.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

from ...attention import Attention
from .sites import MECHANISM, Record, Site, Skipped, install, mix, record_of, uninstall

IMPLEMENTATION = "lot"
"""The value of `attn_implementation`, whichever mechanism sits inside."""

CONFIG_KEY = "lotformer"
"""The key of config.json that holds the recipe of the conversion."""


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
    if not isinstance(getattr(module, MECHANISM, None), Attention):
        raise RuntimeError(
            f"attn_implementation={IMPLEMENTATION!r} is set, but {type(module).__name__} holds no mechanism. Call "
            f"`lotformer.convert(model)` or load with `from_pretrained(..., attn_implementation={IMPLEMENTATION!r})`."
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
    """Make `attn_implementation="lot"` known to transformers and let saved conversions load. Safe to call twice."""
    AttentionInterface.register(IMPLEMENTATION, attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, padding_mask)
    if not hasattr(PreTrainedModel.post_init, "_lotformer"):
        _extend_loading()


def find(model: nn.Module) -> list[Site | Skipped]:
    """Every attention module of the Hugging Face kind in the model."""
    return [_classify(name, module) for name, module in model.named_modules() if _is_attention(module)]


def attach(model: nn.Module, sites: list[Site], build: Callable[[Site], Attention], record: Record) -> None:
    """Convert the given sites."""
    converted = {id(site.module) for site in sites}
    copies: dict[int, PreTrainedConfig] = {}
    for module in model.modules():
        config = module.__dict__.get("config")
        if not isinstance(config, PreTrainedConfig):
            continue
        inside = [id(m) for m in module.modules() if _dispatches(m)]
        if inside and converted.issuperset(inside):
            if id(config) not in copies:
                copies[id(config)] = copy.copy(config)
                # the public setter would reach into sub-configs that unconverted parts share
                copies[id(config)]._attn_implementation_internal = IMPLEMENTATION
            module.__dict__["config"] = copies[id(config)]
            module.__dict__["_lotformer_config"] = config
    for site in sites:
        install(site.module, build(site), copy.deepcopy(record))


def detach(model: nn.Module) -> None:
    """Undo `attach`, exactly."""
    for module in model.modules():
        if "_lotformer_config" in module.__dict__:
            module.__dict__["config"] = module.__dict__.pop("_lotformer_config")
        found = record_of(module)
        if found is not None and found.host == "huggingface":
            uninstall(module)


def _is_attention(module: nn.Module) -> bool:
    if _dispatches(module):
        return True
    home = type(module).__module__
    return home.startswith("transformers.models.") and type(module).__name__.endswith("SelfAttention")


def _dispatches(module: nn.Module) -> bool:
    forward = inspect.unwrap(type(module).forward)
    return "ALL_ATTENTION_FUNCTIONS" in getattr(getattr(forward, "__code__", None), "co_names", ())


def _classify(name: str, module: nn.Module) -> Site | Skipped:
    kind = type(module).__name__
    heads = _first(module, "num_attention_heads", "num_heads", "n_heads", "n_head")
    dim = _first(module, "attention_head_size", "head_dim", "attention_head_dim")
    if dim is None and heads is not None:
        width = _first(module, "all_head_size", "embed_dim", "hidden_size", "dim")
        dim = None if width is None else width // heads
    if not _dispatches(module):
        reason = "it computes its own scores (relative position bias), outside AttentionInterface"
    elif getattr(module, "is_causal", False):
        reason = "it is causal, and a causal doubly stochastic matrix is the identity"
    elif "CrossAttention" in kind or getattr(module, "is_cross_attention", False):
        reason = "it is cross-attention"
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


def _extend_loading() -> None:
    """Let models build their mechanisms when they are constructed from a config that asks for them.

    transformers has no hook between building a model and loading its weights. `post_init`, which every model calls
    at the end of its constructor, is the one place; `_initialize_weights` is where parameters that a checkpoint
    does not hold get their first values.
    """
    post_init, initialize = PreTrainedModel.post_init, PreTrainedModel._initialize_weights

    def post_init_then_convert(self: PreTrainedModel) -> None:
        post_init(self)
        from ..recipe import restore  # the recipe knows how to convert, which knows this module

        restore(self)

    def initialize_mechanisms_too(self: PreTrainedModel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        initialize(self, module, *args, **kwargs)
        if isinstance(module, Attention) and not all(
            getattr(p, "_is_hf_initialized", False) for p in module.parameters()
        ):
            for part in module.modules():
                if callable(reset := getattr(part, "reset_parameters", None)):
                    reset()

    # replacing methods of another library's class is the point here, and what mypy warns of
    post_init_then_convert._lotformer = True  # type: ignore[attr-defined]
    PreTrainedModel.post_init = post_init_then_convert  # type: ignore[method-assign]
    PreTrainedModel._initialize_weights = initialize_mechanisms_too  # type: ignore[method-assign]


register()
