"""PolaFormer: a kernel that keeps like and opposite signs of queries and keys apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..nn.checks import require_moderate
from ..nn.depthwise import DepthwiseMixing
from ..nn.feature_maps import ChannelScale, HeadwiseLinear, TokenPositions
from .base import Cost, Entry
from .clean import CleanAttention
from .inputs import Inputs
from .masking import count_real, zero_padding

_LARGEST_POWER = 16  # of inputs of tens, in fp32


class PolaFormer(CleanAttention):
    """Two kernels on the two halves of the value channels, a convolution of the values, and a gate.

        x± = relu(±x / softplus(scale))^p,  p = 1 + α sigmoid(P)
        like      [q⁺, q⁻] · [k⁺, k⁻]   mixes the first half of the values
        opposite  [q⁻, q⁺] · [k⁺, k⁻]   mixes the second half

    each divided by its mean over keys plus 1e-6. The publication computes the gate from the layer's input; a
    mechanism sees queries, keys and values, so here it is a linear map of the queries, per head.

    Args:
        alpha: range of the learned powers. gate, local_conv: as published, on. kernel_size: side of the 2-D
            convolution, whose filters heads share.
        num_tokens: adds the publication's learned positions to the keys: for at most that many tokens, or for
            `(rows, columns)`, resampled for other grids. They need the length, so they are off until it is given.
    """

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        *,
        alpha: float = 4.0,
        gate: bool = True,
        local_conv: bool = True,
        kernel_size: int = 5,
        num_tokens: int | tuple[int, int] | None = None,
    ) -> None:
        super().__init__(head_dim, num_heads)
        require_moderate("alpha", alpha, most=_LARGEST_POWER)
        self.alpha = alpha
        self.power = nn.Parameter(torch.zeros(num_heads, 1, head_dim))
        self.channel_scale = ChannelScale(num_heads, head_dim)
        self.positions = None if num_tokens is None else TokenPositions(num_heads, num_tokens, head_dim)
        self.gate = HeadwiseLinear(num_heads, head_dim, head_dim) if gate else None
        self.local = DepthwiseMixing(head_dim, "2d", kernel_size, sharing="heads") if local_conv else None

    def why_equal_lengths(self) -> str | None:
        return None if self.local is None else "its convolution of the values; local_conv=False removes it"

    def mix(self, inputs: Inputs) -> Tensor:
        q, k, v, key_mask, _, grid = inputs
        if self.gate is not None and v.shape[-1] != self.head_dim:
            raise ValueError(f"the gate expects values of dimension {self.head_dim}, got {v.shape[-1]}.")
        gate = None if self.gate is None else self.gate(q)
        if self.positions is not None:
            k = self.positions(k, grid)
        phi_q, phi_k = (torch.cat(self._poles(x), -1) for x in (q, k))
        out = _like_and_opposite(phi_q, zero_padding(phi_k, key_mask), v, 1e-6 * count_real(k, key_mask))
        if self.local is not None:
            out = out + self.local(v, grid)
        return out if gate is None else out * gate

    def _poles(self, x: Tensor) -> tuple[Tensor, Tensor]:
        power = 1 + self.alpha * self.power.to(x.dtype).sigmoid()
        x = self.channel_scale(x)
        # one logarithm and one exponential serve both signs; a power of a tensor would redo them in the backward
        size = (power * x.abs().clamp_min(torch.finfo(x.dtype).tiny).log()).exp()
        return torch.where(x > 0, size, 0.0), torch.where(x < 0, size, 0.0)


def _like_and_opposite(phi_q: Tensor, phi_k: Tensor, v: Tensor, eps: Tensor) -> Tensor:
    """Normalised linear attention to the first half of the values by like signs, to the second by opposite ones.

    Features are `[x⁺, x⁻]`. Swapping the signs of the queries is swapping the two halves of what the keys sum up to,
    which is small: both kernels are one product with the queries.
    """
    dim, half = phi_q.shape[-1] // 2, (v.shape[-1] + 1) // 2
    total, summed = phi_k.sum(-2)[..., None], phi_k.mT @ v
    like, opposite = summed[..., :half], summed[..., half:].roll(dim, -2)
    mixed = phi_q @ torch.cat([like, opposite], -1)
    normalizer = phi_q @ torch.cat([total, total.roll(dim, -2)], -1) + eps
    return torch.cat([mixed[..., :half] / normalizer[..., :1], mixed[..., half:] / normalizer[..., 1:]], -1)


def cost(n: int, d: int, *, gate: bool = True, local_conv: bool = True, kernel_size: int = 5, **_: object) -> Cost:
    """Two contractions of 2 d features with half of the values, the convolution and the gate."""
    extra = (2.0 * n * d * kernel_size**2 if local_conv else 0.0) + (2.0 * n * d * d if gate else 0.0)
    return Cost(flops=8.0 * n * d * d + 40.0 * n * d + extra, bytes=44.0 * n * d)


ENTRY = Entry(
    name="polaformer",
    build=PolaFormer,
    summary="Kernels of like and opposite signs, a 2-D convolution and a gate.",
    citation="Meng et al. 2025, PolaFormer: Polarity-aware Linear Attention for Vision Transformers",
    cost=cost,
    time="n",
    is_matrix=False,
    needs_equal_lengths=True,
    needs_grid=True,
)
