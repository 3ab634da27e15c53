"""Rank correlation."""

from __future__ import annotations

import torch
from torch import Tensor


def spearman(x: Tensor, y: Tensor) -> float:
    """Spearman's rank correlation of two vectors, ties by their mean rank."""
    ranks = torch.stack([_ranks(x), _ranks(y)])
    return float(torch.corrcoef(ranks)[0, 1])


def _ranks(x: Tensor) -> Tensor:
    _, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts.double() - 1) / 2)[inverse]
