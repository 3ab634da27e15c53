"""Batches of long sequences: padded to the longest, and composed of sequences of similar length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .store import Example

Batch = dict[str, Tensor]
"""`tokens (B, N)`, or `(B, documents, N)`; `labels (B,)`; and `mask`, True = a real token, where there is padding."""


def collate(examples: Sequence[Example]) -> Batch:
    """Examples as one batch, padded with 0 to the longest document."""
    documents = [document for example in examples for document in example.documents]
    lengths = np.array([len(document) for document in documents])
    tokens = np.zeros((len(documents), max(1, lengths.max())), dtype=np.int64)
    for row, document in zip(tokens, documents, strict=True):
        row[: len(document)] = document
    per_example = len(examples[0].documents)
    shape = (len(examples), -1) if per_example == 1 else (len(examples), per_example, tokens.shape[1])
    batch = {
        "tokens": torch.from_numpy(tokens).reshape(shape),
        "labels": torch.tensor([example.label for example in examples]),
    }
    if lengths.min() < tokens.shape[1]:
        real = np.arange(tokens.shape[1]) < lengths[:, None]
        batch["mask"] = torch.from_numpy(real).reshape(shape)
    return batch


def by_length(
    lengths: npt.NDArray[np.int64], batch_size: int, seed: int, epoch: int, pool: int = 50
) -> list[list[int]]:
    """The batches of an epoch, as indices: random, but with sequences of similar length together.

    Random pools of `pool` batches are sorted by length and cut, so that little is padded; incomplete batches at the end
    are left out. A pure function of its arguments.
    """
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(lengths))
    batches = []
    for start in range(0, len(order), pool * batch_size):
        part = order[start : start + pool * batch_size]
        part = part[np.argsort(lengths[part], kind="stable")]
        batches += [part[i : i + batch_size].tolist() for i in range(0, len(part) - batch_size + 1, batch_size)]
    return [batches[i] for i in rng.permutation(len(batches))]
