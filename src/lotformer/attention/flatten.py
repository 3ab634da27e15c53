"""Focused linear attention (FLatten Transformer): sharpened ReLU features and a convolution of the values."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.linalg import vector_norm

from ..nn.checks import require_moderate
from ..nn.depthwise import DepthwiseMixing
from ..nn.feature_maps import ChannelScale, TokenPositions
from ..nn.linear import linear_attention
from .base import Cost, Entry
from .clean import CleanAttention
from .inputs import Inputs
from .masking import count_real


class FocusedAttention(CleanAttention):
    """Kernel attention with `φ(x) = |y| y^p / |y^p|`, `y = (relu(x) + 1e-6) / softplus(scale)`, plus `conv(v)`.

    Norms run over the channels of all heads, powers over single channels; the normaliser is the mean of
    `φ(q)·φ(k)` plus 1e-6.

    Args:
        focusing_factor: the power p. local_conv: add the depthwise 2-D convolution, whose filters heads share.
        num_tokens: adds the publication's learned positions to the keys: for at most that many tokens, or for
            `(rows, columns)`, resampled for other grids. They need the length, so they are off until it is given.
    """

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        *,
        focusing_factor: float = 3.0,
        local_conv: bool = True,
        kernel_size: int = 5,
        num_tokens: int | tuple[int, int] | None = None,
    ) -> None:
        super().__init__(head_dim, num_heads)
        require_moderate("focusing_factor", focusing_factor)
        self.focusing_factor = focusing_factor
        self.channel_scale = ChannelScale(num_heads, head_dim)
        self.positions = None if num_tokens is None else TokenPositions(num_heads, num_tokens, head_dim)
        self.local = DepthwiseMixing(head_dim, "2d", kernel_size, sharing="heads") if local_conv else None

    @property
    def is_matrix(self) -> bool:
        return self.local is None

    def why_equal_lengths(self) -> str | None:
        return None if self.local is None else "its convolution of the values; local_conv=False removes it"

    def mix(self, inputs: Inputs) -> Tensor:
        q, k, v, key_mask, _, grid = inputs
        if self.positions is not None:
            k = self.positions(k, grid)
        eps = 1e-6 * count_real(k, key_mask)
        out = linear_attention(self._features(q), self._features(k), v, key_mask=key_mask, eps=eps)
        return out if self.local is None else out + self.local(v, grid)

    def _features(self, x: Tensor) -> Tensor:
        x = self.channel_scale(F.relu(x) + 1e-6)
        size = vector_norm(x, dim=(1, 3), keepdim=True)
        # the largest is 1 first: no power overflows, nor do all of them vanish
        focused = (x / x.detach().amax((1, 3), keepdim=True)) ** self.focusing_factor
        return focused * (size / vector_norm(focused, dim=(1, 3), keepdim=True))


def cost(n: int, d: int, *, local_conv: bool = True, kernel_size: int = 5, **_: object) -> Cost:
    convolution = 2.0 * n * d * kernel_size**2 if local_conv else 0.0
    return Cost(flops=4.0 * n * d * d + 30.0 * n * d + convolution, bytes=28.0 * n * d)


ENTRY = Entry(
    name="flatten",
    build=FocusedAttention,
    summary="Sharpened ReLU features and a 2-D convolution.",
    citation="Han et al. 2023, FLatten Transformer: Vision Transformer using Focused Linear Attention",
    cost=cost,
    time="n",
    is_matrix=False,
    needs_equal_lengths=True,
    needs_grid=True,
)
