"""Inputs for tests of the operator."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lotformer.ops import Solution, Solve, Transport, solve_attention


class Inputs(NamedTuple):
    """q, k, v, pivots and log masses of one call of the operator."""

    q: Tensor
    k: Tensor
    v: Tensor
    pivots: Tensor
    log_masses: Tensor

    @property
    def without_values(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.pivots, self.log_masses


def make_inputs(
    batch: int = 2,
    heads: int = 3,
    n: int = 19,
    m: int | None = None,
    rank: int = 5,
    dim: int = 8,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float64,
    requires_grad: bool = False,
) -> Inputs:
    """Gaussian tokens and pivots, pivot masses that are not uniform."""
    m = n if m is None else m
    value_dim = dim if value_dim is None else value_dim
    log_masses = (0.7 * torch.randn(heads, rank, dtype=torch.float64)).log_softmax(-1).to(dtype)
    tensors = (
        torch.randn(batch, heads, n, dim, dtype=dtype),
        torch.randn(batch, heads, m, dim, dtype=dtype),
        torch.randn(batch, heads, m, value_dim, dtype=dtype),
        torch.randn(heads, rank, dim, dtype=dtype),
        log_masses,
    )
    return Inputs(*(x.requires_grad_(requires_grad) for x in tensors))


def solve(*inputs: Tensor, backend: str | None = None, **options: Any) -> Solution:
    """`solve_attention` with the arguments of `lot_attention`."""
    how = {name: options.pop(name) for name in Solve._fields if name in options}
    return solve_attention(Transport(*inputs, **options), Solve(**how), backend)


def lengths_mask(lengths: list[int], size: int, side: str = "right") -> Tensor:
    """Boolean mask `(B, size)` with the given numbers of real tokens, padded on the right, left or both sides."""
    mask = torch.zeros(len(lengths), size, dtype=torch.bool)
    for row, length in zip(mask, lengths, strict=True):
        start = {"right": 0, "left": size - length, "both": (size - length) // 2}[side]
        row[start : start + length] = True
    return mask


def random_masses(*shape: int, mask: Tensor | None = None) -> Tensor:
    """Token masses that are far from uniform, normalised over the real tokens of `mask`."""
    logits = torch.randn(*shape, dtype=torch.float64)
    if mask is not None:
        logits = logits.masked_fill(~mask.view(mask.shape[0], *[1] * (len(shape) - 2), -1), -torch.inf)
    return logits.softmax(-1)
