"""Skyformer: the Gaussian kernel of kernelized attention, rebuilt from sampled queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from ..nn.checks import require_moderate
from ..nn.inverse import iterative_pseudo_inverse
from .base import Cost, Entry
from .clean import CleanAttention
from .inputs import Inputs
from .masking import count_real


class Skyformer(CleanAttention):
    """`κ(q, S) (κ(S, S) + ridge I)⁻¹ κ(S, k) v` with `κ(x, y) = exp(−|x − y|² / (2 √D))`.

    S holds sampled tokens, half of them queries and half keys. They sit at the quantiles `positions` of the real
    tokens: a buffer drawn once, one number in each of equal strata, replaced by `redraw()`. So evaluation is
    reproducible and a sample does not depend on its batch; published code draws anew at each call, for the batch.
    The inverse is iterative, on the matrix scaled to unit row sums.
    """

    positions: Tensor

    def __init__(
        self, head_dim: int, num_heads: int, *, features: int = 128, ridge: float = 0.1, inverse_iters: int = 6
    ) -> None:
        super().__init__(head_dim, num_heads)
        if features < 2 or features % 2:
            raise ValueError(f"features must be even and at least 2 (queries and keys by halves), got {features}.")
        require_moderate("ridge", ridge, least=0)
        self.ridge = ridge
        self.inverse_iters = inverse_iters
        self.register_buffer("positions", torch.empty(2, features // 2))
        self.redraw()

    @torch.no_grad()
    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw new sample positions in place."""
        half = self.positions.shape[1]
        self.positions.copy_((torch.arange(half) + torch.rand(2, half, generator=generator)) / half)

    def mix(self, inputs: Inputs) -> Tensor:
        q, k, v, key_mask, query_mask, *_ = inputs
        scale = self.head_dim**-0.25
        q, k = q * scale, k * scale
        sampled = torch.cat(
            [_take(q, query_mask, self.positions[0]), _take(k, key_mask, self.positions[1])],
            2,
        )
        core = _gaussian(sampled, sampled)
        core = core + self.ridge * torch.eye(core.shape[-1], dtype=core.dtype, device=core.device)
        root = core.sum(-1, keepdim=True).rsqrt()
        inverse = root * iterative_pseudo_inverse(root * core * root.mT, self.inverse_iters) * root.mT
        return _gaussian(q, sampled) @ (inverse @ (_gaussian(sampled, k) @ v))


def _gaussian(x: Tensor, y: Tensor) -> Tensor:
    squares = 0.5 * x.square().sum(-1)[..., :, None] + 0.5 * y.square().sum(-1)[..., None, :]
    return (x @ y.mT - squares).clamp_max(0.0).exp()


def _take(x: Tensor, mask: Tensor | None, positions: Tensor) -> Tensor:
    """The real tokens of `x (B, H, N, D)` at the given quantiles, `(B, H, S, D)`."""
    batch, heads, _, dim = x.shape
    count = count_real(x, mask)[:, 0, 0]
    index = (positions.to(x.dtype) * count).long().minimum(count.long() - 1)
    if mask is not None:  # a stable sort brings the real tokens to the front in their order
        index = (~mask).to(torch.uint8).argsort(dim=-1, stable=True).gather(1, index)
    return x.gather(2, index[:, None, :, None].expand(batch, heads, -1, dim))


def cost(n: int, d: int, *, features: int = 128, inverse_iters: int = 6, **_: object) -> Cost:
    """Two kernels with the sampled tokens, their products with the values, and the inverse."""
    m = features
    return Cost(flops=8.0 * n * m * d + 8.0 * inverse_iters * m**3, bytes=16.0 * n * d + 8.0 * n * m)


ENTRY = Entry(
    name="skyformer",
    build=Skyformer,
    summary="Nyström reconstruction of the Gaussian kernel from sampled tokens.",
    citation="Chen et al. 2021, Skyformer: Remodel Self-Attention with Gaussian Kernel and Nyström Method",
    cost=cost,
    time="n",
)
