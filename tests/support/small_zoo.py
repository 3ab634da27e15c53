"""Small mechanisms in fp64, tokens for them, and what their dense definitions share."""

from __future__ import annotations

import torch
from torch import Tensor

from lotformer.attention import build

HEADS, DIM = 2, 8
SMALL: dict[str, dict[str, object]] = {
    "local": {"block_size": 5},
    "longformer": {"window": 8, "global_tokens": 1},
    "bigbird": {"block_size": 4, "random_blocks": 2},
    "reformer": {"chunk_size": 4},
    "deltanet": {"chunk_size": 4},
    "mamba2": {"chunk_size": 4},
}


def tokens(batch: int, n: int, m: int | None = None, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    return tuple(torch.randn(batch, HEADS, length, DIM, dtype=dtype) for length in (n, m or n, m or n))


def make(name: str, **options: object) -> torch.nn.Module:
    return build(name, head_dim=DIM, num_heads=HEADS, **options).double()


def dense_softmax(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~allowed, -torch.inf)
    return scores.softmax(-1).nan_to_num() @ v


def holes(batch: int, n: int, seed: int = 1) -> Tensor:
    """Some padding in the middle and at the end, but never everything."""
    mask = torch.rand(batch, n, generator=torch.Generator().manual_seed(seed)) > 0.3
    mask[:, 0] = True
    return mask


def assert_equal(expected: Tensor, got: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
