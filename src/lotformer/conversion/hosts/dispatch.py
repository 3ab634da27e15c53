"""Functions that transformers calls in a converted model: the attention and the masks of `attn_implementation="lot"`.

Neither this module nor others that `conversion.pretrained` needs import `transformers.modeling_utils` on their own:
whoever does so first has it registered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

from . import configs
from .configs import IMPLEMENTATION, SAVED
from .sites import MECHANISM, mix


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
    """Attention function for transformers in place of softmax; returns `(B, N, H, D)` and no weights.

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
    """Mask function for transformers: `(B, M)` where the mask of converted layers is about padding only."""
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
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in (IMPLEMENTATION, SAVED):
        AttentionInterface.register(name, attention_forward)
        AttentionMaskInterface.register(name, padding_mask)
