"""Batches: what a model is called with, and what matters in what it returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Batch = Mapping[str, Any] | Sequence[Any] | Tensor
"""A mapping holds keyword arguments of the model, a tensor is its one argument. A list or tuple is what data loaders
yield: its first item holds the inputs, the others are labels, which only a task's loss looks at."""


def require_batches(batches: Any) -> None:
    """Refuse what is not several batches. One batch would be taken apart: a mapping into names, a tensor into rows.

    Raises:
        TypeError: it is one batch, or nothing that can be gone through.
    """
    if isinstance(batches, (Mapping, Tensor)):
        raise TypeError(
            f"`batches`: expected an iterable of batches, got one batch ({type(batches).__name__}): pass [batch]."
        )
    if not isinstance(batches, Iterable):
        raise TypeError(
            f"`batches`: expected an iterable of batches (a list, a data loader), got {type(batches).__name__}."
        )


def inputs_of(batch: Batch) -> Mapping[str, Any] | Tensor:
    """The arguments of a model's call: keyword arguments, or the only argument.

    Raises:
        TypeError: the batch is none of the accepted forms.
    """
    inputs = batch[0] if isinstance(batch, (list, tuple)) and batch else batch
    if not isinstance(inputs, (Mapping, Tensor)):
        what = f"{type(batch).__name__} of {type(inputs).__name__}" if inputs is not batch else type(batch).__name__
        what = what if not isinstance(batch, (list, tuple)) or batch else f"an empty {what}"
        hint = " Tokenise texts first, as in `tokenizer(texts, padding=True, return_tensors='pt')`."
        raise TypeError(
            "a batch must be a mapping of tensors, a tensor, or a pair (inputs, labels); "
            f"got {what}.{hint if isinstance(inputs, str) else ''}"
        )
    for name, value in inputs.items() if isinstance(inputs, Mapping) else ():
        if isinstance(value, list) and value and isinstance(value[0], (list, int, float)):
            raise TypeError(
                f"a batch must be a mapping of tensors, but {name!r} is a list: use `torch.as_tensor`, or "
                "`tokenizer(texts, padding=True, return_tensors='pt')`."
            )
    return inputs


def require_finite(batch: Batch, what: str = "a batch") -> None:
    """Refuse inputs that hold NaN or inf; additive masks do so by right."""
    floats = {n: x for n, x in tensors_of(inputs_of(batch)).items() if x.is_floating_point() and "mask" not in n}
    bad = [name for name, x in floats.items() if not x.isfinite().all()]
    if bad:
        raise ValueError(f"{what}: its inputs are not finite, there is NaN or inf in {', '.join(bad)}.")


def require_contents(inputs: Mapping[str, Any] | Tensor) -> None:
    """Refuse inputs without a tensor, or with one that is empty."""
    tensors = tensors_of(inputs)
    empty = [f"{name} is {tuple(x.shape)}" for name, x in tensors.items() if not x.numel()]
    if empty or not tensors:
        raise ValueError(f"a batch is empty: {', '.join(empty) or 'there is no tensor in it'}. Leave it out.")


def tensors_of(inputs: Mapping[str, Any] | Tensor) -> dict[str, Tensor]:
    """The tensors of a batch by what to call them."""
    if isinstance(inputs, Tensor):
        return {"the tensor": inputs}
    return {f"`{name}`": value for name, value in inputs.items() if isinstance(value, Tensor)}


def to_learn_from(x: Any) -> Any:
    """Tensors that were made in inference mode cannot be kept for backward; copies of them can."""
    made_elsewhere = isinstance(x, Tensor) and x.is_inference() and not torch.is_inference_mode_enabled()
    return x.clone() if made_elsewhere else x


def main_tensor(output: Any) -> Tensor:
    """The tensor that matters in an output: the last hidden state, the logits, or the first tensor there is."""
    for name in ("last_hidden_state", "logits", "sample", "sentence_embedding"):
        value = output.get(name) if isinstance(output, dict) else getattr(output, name, None)
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
    """The padding mask of a batch `(B, N, 1)` in the dtype of its hidden states `(B, N, C)`, or None if it has none.

    One of more samples than there are states, of a wave, is that of the states as far as they are all real.
    """
    inputs = inputs_of(batch)
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    if mask is None or mask.dim() != 2 or hidden.dim() != 3 or mask.shape[0] != hidden.shape[0]:
        return None
    tokens = hidden.shape[1]
    if mask.shape[1] >= 2 * tokens:
        real = mask.sum(-1, keepdim=True) * tokens // mask.shape[1]
        mask = torch.arange(tokens, device=mask.device) < real
    if mask.shape != hidden.shape[:2]:
        return None
    return mask[..., None].to(hidden.dtype)
