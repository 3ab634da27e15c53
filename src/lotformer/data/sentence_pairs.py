"""Pairs of sentences that people have compared, and how well an encoder agrees with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import glue
from .ranks import spearman
from .text import embed

PARTS = ("first half", "second half", "all")


class SentencePairs:
    """Pairs of sentences with the similarity that people gave them."""

    def __init__(self, examples: Sequence[glue.Example]) -> None:
        self.texts = [example.texts[side] for example in examples for side in (0, 1)]
        self.labels = torch.tensor([example.label for example in examples])

    def __len__(self) -> int:
        return len(self.labels)

    def embed(self, model: nn.Module, tokenizer: Any, *, max_length: int = 128) -> Tensor:
        """Unit embeddings `(pairs, 2, C)`."""
        return embed(model, tokenizer, self.texts, max_length=max_length).unflatten(0, (-1, 2))

    def spearman(self, embeddings: Tensor, part: slice = slice(None)) -> float:
        """Rank correlation between the cosine of a pair and its label."""
        left, right = embeddings[part].unbind(1)
        return spearman((left * right).sum(-1), self.labels[part])

    def parts(self) -> dict[str, slice]:
        half = len(self) // 2
        return dict(zip(PARTS, (slice(half), slice(half, None), slice(None)), strict=True))
