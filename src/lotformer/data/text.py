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
    tokenizer: Any, texts: Sequence[str], *, batch_size: int = 32, max_length: int = 256
) -> list[dict[str, Tensor]]:
    """Texts as model inputs, texts of like length together: little padding, and the same batches every time."""
    ordered = sorted(texts, key=len)
    return [
        dict(_tokenize(tokenizer, ordered[i : i + batch_size], max_length)) for i in range(0, len(ordered), batch_size)
    ]


@torch.no_grad()
def embed(
    model: nn.Module, tokenizer: Any, texts: Sequence[str], *, batch_size: int = 64, max_length: int = 256
) -> Tensor:
    """Unit sentence embeddings `(texts, C)`: mean over real tokens, normalised; in evaluation mode."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    found: list[Tensor] = [torch.empty(0)] * len(texts)
    training = model.training
    model.eval()
    for start in range(0, len(order), batch_size):
        chunk = order[start : start + batch_size]
        batch = dict(_tokenize(tokenizer, [texts[i] for i in chunk], max_length))
        vectors = nn.functional.normalize(pooled(main_tensor(model(**batch)), batch), dim=-1)
        for i, vector in zip(chunk, vectors, strict=True):
            found[i] = vector
    model.train(training)
    return torch.stack(found)


def _tokenize(tokenizer: Any, texts: Sequence[str], max_length: int) -> Any:
    longest = min(max_length, tokenizer.model_max_length)
    return tokenizer(list(texts), padding=True, truncation=True, max_length=longest, return_tensors="pt")
