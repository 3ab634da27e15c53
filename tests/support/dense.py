"""Small inputs and dense formulas that the tests of the mechanisms share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lotformer import attention
from lotformer.attention.base import Attention

B, H, D = 2, 3, 6


def tokens(n: int, m: int | None = None, *, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    m = n if m is None else m
    shapes = ((B, H, n, D), (B, H, m, D), (B, H, m, D))
    q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return q * scale, k * scale, v


def build(name: str, **options: object) -> Attention:
    return attention.build(name, head_dim=D, num_heads=H, **options).double()


def close(got: Tensor, expected: Tensor, tol: float = 1e-10) -> None:
    torch.testing.assert_close(got, expected, rtol=tol, atol=tol)


def normalized(weights: Tensor, eps: float = 0.0) -> Tensor:
    return weights / (weights.sum(-1, keepdim=True) + eps)


def softmax_matrix(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT * D**-0.5).softmax(-1)


def gaussian(x: Tensor, y: Tensor) -> Tensor:
    squares = (x[..., :, None, :] - y[..., None, :, :]).square().sum(-1)
    return (-squares / (2 * math.sqrt(D))).exp()
