"""More positions for text encoders that learned a vector for each: the table is interpolated, and can be had back.

What tells a table of learned absolute positions from everything else is that Hugging Face's encoders (BERT, RoBERTa,
DistilBERT, ELECTRA, …) keep it beside the words: `position_embeddings` and `word_embeddings` in one module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..recipe import Positions

_ORIGINAL = "original_positions"
"""Name of the buffer that keeps the table as it was learned; saved with the weights."""

_CONFIG = "max_position_embeddings"


def learned_positions(model: nn.Module) -> int | None:
    """The number of positions in the learned table of a model; None without one."""
    found = _tables(model)
    return _tokens(found[0]) if len(found) == 1 else None


def plan(model: nn.Module, tokens: int) -> Positions:
    """The positions that let a model read so many tokens.

    Raises:
        ValueError: it has no learned table of absolute positions, or one that is long enough.
    """
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise ValueError(f"max_positions must be a number of tokens, got {tokens!r}.")
    found = _tables(model)
    if len(found) != 1:
        raise ValueError(f"max_positions={tokens}: {type(model).__name__} {_why_not(model, len(found))}")
    trained = _tokens(found[0])
    if tokens <= trained:
        raise ValueError(f"max_positions={tokens}: {type(model).__name__} has positions for {trained} tokens already.")
    return Positions(trained, tokens)


def stretch(model: nn.Module, positions: Positions) -> None:
    """Interpolate the table, between the first and the last position it has; the original is kept beside it.

    A model that is being built from the config of a stretched one has room for both already, and gets them when its
    weights are loaded.

    Raises:
        ValueError: the table has another size.
    """
    found = _tables(model)
    if len(found) != 1:
        return  # a part without its embeddings
    (embeddings,) = found
    if hasattr(embeddings, _ORIGINAL):
        return
    table, first = embeddings.position_embeddings.weight, _first(embeddings)
    if _tokens(embeddings) == positions.tokens:
        embeddings.register_buffer(_ORIGINAL, table.new_empty(positions.trained + first, table.shape[1]))
        return
    if _tokens(embeddings) != positions.trained:
        raise ValueError(
            f"the recipe stretches positions for {positions.trained} tokens to {positions.tokens}, "
            f"the model has them for {_tokens(embeddings)}."
        )
    original = table.detach().clone()
    _replace(embeddings, torch.cat([original[:first], _interpolated(original[first:], positions.tokens)]))
    embeddings.register_buffer(_ORIGINAL, original)


def restore(model: nn.Module) -> None:
    """Put the learned table back, bit for bit, if it was stretched."""
    for embeddings in _tables(model):
        if hasattr(embeddings, _ORIGINAL):
            original, rows = getattr(embeddings, _ORIGINAL), embeddings.position_embeddings.num_embeddings
            delattr(embeddings, _ORIGINAL)
            _replace(embeddings, original)
            _tell_configs(model, rows, len(original))


def tell_configs(model: nn.Module, positions: Positions) -> None:
    """Let the configs in a stretched model, which must be its own, say how large its table is."""
    for embeddings in _tables(model):
        first = _first(embeddings)
        _tell_configs(model, positions.trained + first, positions.tokens + first)


def _tell_configs(model: nn.Module, before: int, now: int) -> None:
    for module in model.modules():
        config = module.__dict__.get("config")
        if getattr(config, _CONFIG, None) == before:
            setattr(config, _CONFIG, now)


def _tables(model: nn.Module) -> list[Any]:
    return [
        module
        for module in model.modules()
        if type(getattr(module, "position_embeddings", None)) is nn.Embedding and hasattr(module, "word_embeddings")
    ]


def _why_not(model: nn.Module, found: int) -> str:
    if found:
        return f"has {found} tables of positions: convert the part whose texts are long."
    return (
        "has no table of positions that a text encoder has learned (`position_embeddings` beside `word_embeddings`), "
        "which is what can be interpolated; rotary and relative positions have no table to run out of."
    )


def _first(embeddings: Any) -> int:
    """The first position of a text: tables like RoBERTa's begin after the one of padding."""
    padding = embeddings.position_embeddings.padding_idx
    return 0 if padding is None else padding + 1


def _tokens(embeddings: Any) -> int:
    return embeddings.position_embeddings.num_embeddings - _first(embeddings)


def _interpolated(table: Tensor, tokens: int) -> Tensor:
    """`(tokens, C)` from `(N, C)`, linearly; the ends stay where they are."""
    columns = table.float().T[None]
    return nn.functional.interpolate(columns, tokens, mode="linear", align_corners=True)[0].T.to(table.dtype)


def _replace(embeddings: Any, table: Tensor) -> None:
    """Another table in the same module, with the buffers that are as long as it is."""
    layer: nn.Embedding = embeddings.position_embeddings
    layer.num_embeddings = len(table)
    layer.weight = nn.Parameter(table.contiguous(), requires_grad=layer.weight.requires_grad)
    for name, make in (("position_ids", torch.arange), ("token_type_ids", torch.zeros)):
        old = embeddings._buffers.get(name)
        if old is not None:
            new = make(len(table), dtype=old.dtype, device=old.device).expand(1, -1)
            embeddings.register_buffer(name, new, persistent=name not in embeddings._non_persistent_buffers_set)
