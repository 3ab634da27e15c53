"""Batches of sentence pairs: as many as fit into a number of tokens, of similar length together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .lines import Pair

Batch = dict[str, Tensor]
"""`input_ids (B, N)`, `attention_mask (B, N)` and `decoder_input_ids (B, M)`, as transformers' models take them."""


@dataclass(frozen=True)
class Encoded:
    """The tokens of one pair, each side with its closing token."""

    source: npt.NDArray[np.int32]
    target: npt.NDArray[np.int32]


class EncodedPairs(Sequence[Encoded]):
    """All pairs as tokens; sides longer than `longest` are cut, and keep their closing token."""

    def __init__(self, pairs: Sequence[Pair], tokenizer: Any, longest: int = 1024) -> None:
        cut = {"truncation": True, "max_length": longest, "return_attention_mask": False}
        sources = tokenizer([source for source, _ in pairs], **cut)["input_ids"]
        targets = tokenizer(text_target=[target for _, target in pairs], **cut)
        self._items = [
            Encoded(np.asarray(source, np.int32), np.asarray(target, np.int32))
            for source, target in zip(sources, targets["input_ids"], strict=True)
        ]

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of source and target `(pairs, 2)`."""
        return np.array([(len(item.source), len(item.target)) for item in self._items]).reshape(-1, 2)


@dataclass(frozen=True)
class Collate:
    """Pairs as one batch, padded to the longest."""

    pad: int
    start: int

    def __call__(self, items: Sequence[Encoded]) -> Batch:
        sources = padded([item.source for item in items], self.pad)
        targets = padded([item.target for item in items], self.pad)
        real = np.arange(sources.shape[1]) < np.array([len(item.source) for item in items])[:, None]
        # the decoder sees the start and every token but the closing one, which it has only to say
        lengths = np.array([len(item.target) for item in items])
        shown = np.where(np.arange(targets.shape[1]) < lengths[:, None] - 1, targets, self.pad)
        shown = np.concatenate([np.full((len(items), 1), self.start), shown[:, :-1]], 1)
        return {
            "input_ids": torch.from_numpy(sources),
            "attention_mask": torch.from_numpy(real.astype(np.int64)),
            "decoder_input_ids": torch.from_numpy(shown),
        }


def labels_of(decoder_input_ids: Tensor, pad: int, eos: int) -> Tensor:
    """Targets of a decoder shown `start, y₁ … yₙ, pad …`: `y₁ … yₙ, eos, pad …`, of the same shape."""
    said = torch.nn.functional.pad(decoder_input_ids[:, 1:], (0, 1), value=pad)
    lengths = (said != pad).sum(1, keepdim=True)
    return said.scatter(1, lengths, eos)


def padded(rows: Sequence[npt.NDArray[np.int32]], pad: int) -> npt.NDArray[np.int64]:
    """Rows of tokens as a matrix as wide as the longest."""
    made = np.full((len(rows), max(map(len, rows))), pad, np.int64)
    for row, tokens in zip(made, rows, strict=True):
        row[: len(tokens)] = tokens
    return made


def by_tokens(
    lengths: npt.NDArray[np.int64], max_tokens: int, seed: int, epoch: int, max_sentences: int | None = None
) -> list[list[int]]:
    """The batches of an epoch, as indices: no side of a batch has over `max_tokens` tokens, padding counted.

    Pairs are sorted by their longer side, equally long ones in random order, cut into batches, and the batches
    shuffled: fairseq's order. A pure function of its arguments; every pair occurs once.

    Args:
        lengths: of source and target `(pairs, 2)`.

    Raises:
        ValueError: a pair is longer than a batch may be.
    """
    widths = lengths.max(1)
    if len(widths) and widths.max() > max_tokens:
        worst = int(widths.argmax())
        raise ValueError(f"pair {worst + 1} has {widths[worst]} tokens and a batch at most {max_tokens}: allow more.")
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(widths))
    order = order[np.lexsort((lengths[order].min(1), widths[order]))]
    batches: list[list[int]] = []
    current: list[int] = []
    for index in order.tolist():
        # sorted: the newest pair is the widest
        full = (len(current) + 1) * widths[index] > max_tokens or len(current) == max_sentences
        if current and full:
            batches.append(current)
            current = []
        current.append(index)
    if current:
        batches.append(current)
    return [batches[i] for i in rng.permutation(len(batches))]
