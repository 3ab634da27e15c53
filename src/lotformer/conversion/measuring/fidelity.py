"""Fidelity of a converted sentence encoder: its embeddings before and after, compared."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...data.ranks import spearman


@dataclass(frozen=True)
class Fidelity:
    """Agreement of two sets of embeddings of the same texts.

    Attributes:
        cosine: mean cosine between the two embeddings of a text.
        rank_correlation: Spearman's, between the similarities of all pairs of texts.
        neighbour_agreement: share of texts whose nearest other text is the same.
    """

    cosine: float
    rank_correlation: float
    neighbour_agreement: float


def fidelity(original: Tensor, converted: Tensor) -> Fidelity:
    """Compare unit embeddings `(texts, C)`, row by row and pair by pair."""
    if original.shape != converted.shape:
        raise ValueError(f"expected embeddings of equal shape, got {tuple(original.shape)}, {tuple(converted.shape)}.")
    count = original.shape[0]
    upper = torch.triu_indices(count, count, 1)
    before, after = original @ original.T, converted @ converted.T
    nearest = [s.fill_diagonal_(-torch.inf).argmax(-1) for s in (before.clone(), after.clone())]
    return Fidelity(
        cosine=float((original * converted).sum(-1).mean()),
        rank_correlation=spearman(before[upper[0], upper[1]], after[upper[0], upper[1]]),
        neighbour_agreement=float((nearest[0] == nearest[1]).float().mean()),
    )
