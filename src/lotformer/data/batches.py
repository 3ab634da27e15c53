"""Batches: what a model is called with, and what matters in what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

Batch = Mapping[str, Any] | tuple[Any, ...] | Tensor
"""Inputs of a model: keyword arguments, positional arguments, or the one argument."""


def call(model: nn.Module, batch: Batch) -> Any:
    """The model's output on a batch of any of the accepted forms."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple):
        return model(*batch)
    return model(batch)


def main_tensor(output: Any) -> Tensor:
    """The tensor that matters in an output: the last hidden state, the logits, or the first tensor there is."""
    for name in ("last_hidden_state", "logits", "sample"):
        value = getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    if isinstance(output, Tensor):
        return output
    values = output.values() if isinstance(output, Mapping) else output
    for value in values:
        if isinstance(value, Tensor):
            return value
    raise TypeError(f"no tensor in the model's output of type {type(output).__name__}.")


def pooled(hidden: Tensor, batch: Batch) -> Tensor:
    """The mean over real tokens `(B, C)` of hidden states `(B, N, C)`; anything else passes through."""
    if hidden.dim() != 3:
        return hidden
    mask = real_tokens(hidden, batch)
    if mask is None:
        return hidden.mean(1)
    return (hidden * mask).sum(1) / mask.sum(1).clamp_min(1)


def real_tokens(hidden: Tensor, batch: Batch) -> Tensor | None:
    """The padding mask of a batch `(B, N, 1)` in the dtype of its hidden states `(B, N, C)`, or None if it has none."""
    mask = batch.get("attention_mask") if isinstance(batch, dict) else None
    if mask is None or mask.dim() != 2 or hidden.dim() != 3 or mask.shape != hidden.shape[:2]:
        return None
    return mask[..., None].to(hidden.dtype)
