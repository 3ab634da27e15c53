"""Performer: softmax attention in expectation, by positive orthogonal random features (FAVOR+)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..nn.checks import require_count
from ..nn.feature_maps import exponential_features
from ..nn.linear import linear_attention
from .base import Cost, Entry
from .clean import CleanAttention
from .inputs import Inputs


class Performer(CleanAttention):
    """Kernel attention with `φ(x) = exp(W x − |x|²/2)`, `x = D^-1/4` times a query or key.

    `E[φ(q)·φ(k)] = exp(q·k / √D)` for Gaussian rows of W, so that it approaches softmax attention as features grow.
    Rows are orthogonal in blocks of D, with the lengths of Gaussian vectors. W is a buffer: saved with the model,
    equal for all samples, the same at each evaluation; `redraw()` replaces it. Maxima are taken out feature by
    feature where they cancel exactly, in place of the additive 1e-4 of published code, which biases the kernel.

    Args:
        features: number of random features, `D log D` by default.
    """

    projection: Tensor

    def __init__(self, head_dim: int, num_heads: int, *, features: int | None = None) -> None:
        super().__init__(head_dim, num_heads)
        self.features = _default_features(head_dim) if features is None else features
        require_count("features", self.features)
        self.register_buffer("projection", torch.empty(self.features, head_dim))
        self.redraw()

    @torch.no_grad()
    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw new random features in place."""
        blocks = -(-self.features // self.head_dim)
        gaussian = torch.randn(blocks, self.head_dim, self.head_dim, generator=generator)
        basis, triangle = torch.linalg.qr(gaussian)
        # the signs of R make the basis uniform; as LAPACK returns it, directions lean to one side and bias the kernel
        basis = basis * triangle.diagonal(dim1=-2, dim2=-1).sign()[:, None]
        directions = basis.mT.reshape(-1, self.head_dim)[: self.features]
        lengths = torch.randn(self.features, self.head_dim, generator=generator).norm(dim=-1, keepdim=True)
        self.projection.copy_(directions * lengths)

    def mix(self, inputs: Inputs) -> Tensor:
        q, k, v, key_mask, *_ = inputs
        scale = self.head_dim**-0.25
        projection = self.projection.to(q.dtype) * scale
        # |q|²/2 is constant along a row of the matrix and cancels
        log_q = q @ projection.mT
        log_k = k @ projection.mT - 0.5 * (k * scale).square().sum(-1, keepdim=True)
        phi_q, phi_k = exponential_features(log_q, log_k, key_mask)
        return linear_attention(phi_q, phi_k, v, key_mask=key_mask)


def _default_features(head_dim: int) -> int:
    return max(1, int(head_dim * math.log(head_dim)))


def cost(n: int, d: int, *, features: int | None = None, **_: object) -> Cost:
    """Features of both sides and the two products of the contraction."""
    m = _default_features(d) if features is None else features
    return Cost(flops=8.0 * n * m * d + 8.0 * n * m, bytes=16.0 * n * d + 8.0 * n * m)


ENTRY = Entry(
    name="performer",
    build=Performer,
    summary="Positive orthogonal random features of the softmax kernel.",
    citation="Choromanski et al. 2021, Rethinking Attention with Performers",
    cost=cost,
    time="n",
)
