"""Texts to batches and back: what calibrating and judging a text encoder needs."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .batches import main_tensor, pooled


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of a Hugging Face checkpoint.

    Raises:
        ImportError: it is of SentencePiece's kind (Marian's are), and that is not installed.
    """
    from transformers import AutoTokenizer

    if any(Path(folder).glob("*.spm")) and importlib.util.find_spec("sentencepiece") is None:
        raise ImportError("the tokenizer of this checkpoint needs SentencePiece: pip install 'lotformer[text]'.")
    return AutoTokenizer.from_pretrained(str(folder))


def text_batches(
    tokenizer: Any,
    texts: Sequence[str],
    *,
    batch_size: int = 32,
    max_length: int = 256,
    model: nn.Module | None = None,
) -> list[dict[str, Tensor]]:
    """Texts as model inputs, texts of like length together: little padding, and the same batches every time.

    They are cut to `max_length` tokens, or to what the tokenizer or else the `model` says it can read.
    """
    ordered, longest = sorted(texts, key=len), _longest(tokenizer, model, max_length)
    return [
        dict(_tokenize(tokenizer, ordered[i : i + batch_size], longest)) for i in range(0, len(ordered), batch_size)
    ]


def positions_of(model: nn.Module | None) -> int | None:
    """The number of positions of a Hugging Face model, if its config has it."""
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return max(1, positions - 2) if isinstance(positions, int) else None  # RoBERTa's start at 2


@torch.no_grad()
def embed(
    model: nn.Module, tokenizer: Any, texts: Sequence[str], *, batch_size: int = 64, max_length: int = 256
) -> Tensor:
    """Unit sentence embeddings `(texts, C)`: mean over real tokens, normalised; in evaluation mode."""
    order, longest = sorted(range(len(texts)), key=lambda i: len(texts[i])), _longest(tokenizer, model, max_length)
    found: list[Tensor] = [torch.empty(0)] * len(texts)
    training = model.training
    model.eval()
    for start in range(0, len(order), batch_size):
        chunk = order[start : start + batch_size]
        batch = dict(_tokenize(tokenizer, [texts[i] for i in chunk], longest))
        vectors = nn.functional.normalize(pooled(main_tensor(model(**batch)), batch), dim=-1)
        for i, vector in zip(chunk, vectors, strict=True):
            found[i] = vector
    model.train(training)
    return torch.stack(found)


_UNKNOWN = 10**6  # tokenizers that were not told how much a model reads name a huge number


def _longest(tokenizer: Any, model: nn.Module | None, asked: int) -> int:
    limit = tokenizer.model_max_length
    if limit > _UNKNOWN:
        limit = positions_of(model) or asked
    return min(asked, limit)


def _tokenize(tokenizer: Any, texts: Sequence[str], longest: int) -> Any:
    return tokenizer(list(texts), padding=True, truncation=True, max_length=longest, return_tensors="pt")
