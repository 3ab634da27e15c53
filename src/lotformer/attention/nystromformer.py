"""Nyströmformer: softmax attention rebuilt from its rows and columns at a few landmarks."""

from __future__ import annotations

import torch
from torch import Tensor

from ..nn.checks import require_count
from ..nn.depthwise import DepthwiseMixing
from ..nn.inverse import iterative_pseudo_inverse
from ..nn.softmax import fused_softmax
from .base import Cost, Entry
from .clean import CleanAttention
from .inputs import Inputs
from .masking import count_real, rank_among_real


class Nystromformer(CleanAttention):
    """`softmax(q k̃ᵀ) softmax(q̃ k̃ᵀ)⁺ softmax(q̃ kᵀ) v`, scores times `D^-1/2`, plus a convolution of the values.

    The landmarks q̃, k̃ are means of equal segments of the real tokens; with one landmark per token it is softmax
    attention.

    Args:
        landmarks: number of segments. inverse_iters: steps of the iterative pseudo-inverse.
        conv_kernel: length of the depthwise convolution along the sequence (one filter per head), or None. Without
            it, queries and keys may differ in number.
    """

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        *,
        landmarks: int = 64,
        inverse_iters: int = 6,
        conv_kernel: int | None = 33,
    ) -> None:
        super().__init__(head_dim, num_heads)
        for name, value in (("landmarks", landmarks), ("inverse_iters", inverse_iters)):
            require_count(name, value)
        self.landmarks = landmarks
        self.inverse_iters = inverse_iters
        self.local = None if conv_kernel is None else DepthwiseMixing(num_heads, "1d", conv_kernel, sharing="channels")

    def why_equal_lengths(self) -> str | None:
        return None if self.local is None else "its convolution of the values; conv_kernel=None removes it"

    def mix(self, inputs: Inputs) -> Tensor:
        q, k, v, key_mask, query_mask, *_ = inputs
        q = q * self.head_dim**-0.5
        # fewer tokens than landmarks leave segments empty: those neither read nor are read
        q_land, q_used = segment_means(q, query_mask, self.landmarks)
        k_land, k_used = segment_means(k, key_mask, self.landmarks)
        between = _softmax(q_land @ k_land.mT, k_used)
        if q_used is not None:
            between = between * q_used[..., None]
        inverse = iterative_pseudo_inverse(between, self.inverse_iters)
        read = fused_softmax(q_land, k, v, inputs.allowed, scale=1.0)
        out = fused_softmax(q, k_land, inverse @ read, None if k_used is None else k_used[..., None, :], scale=1.0)
        return out if self.local is None else out + self.local(v)


def segment_means(x: Tensor, mask: Tensor | None, segments: int) -> tuple[Tensor, Tensor | None]:
    """Means `(B, H, S, D)` of equal segments of the real tokens of `x (B, H, N, D)`, and which are not empty.

    The second is `(B, 1, S)`, or None without a mask, when all are used; S is `segments`, or N if that is less.
    """
    batch, heads, length, dim = x.shape
    segments = min(segments, length)
    if mask is None and length % segments == 0:
        return x.unflatten(2, (segments, -1)).mean(3), None
    count = count_real(x, mask)[:, 0, 0].long()
    segment = (rank_among_real(x, mask) * segments // count).clamp(0, segments - 1)  # padding is clean: it adds zero
    weight = x.new_ones(1, length) if mask is None else mask.to(x.dtype)
    sizes = x.new_zeros(segment.shape[0], segments).scatter_add(1, segment, weight)[:, None]
    index = segment[:, None, :, None].expand(batch, heads, length, dim)
    sums = x.new_zeros(batch, heads, segments, dim).scatter_add(2, index, x)
    return sums / sizes.clamp_min(1)[..., None], None if mask is None else sizes > 0


def _softmax(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """Row softmax over the allowed columns `(B, 1, M)`; a row with none is zero."""
    if allowed is None:
        return scores.softmax(-1)
    allowed = allowed[..., None, :]
    return scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1) * allowed


def cost(
    n: int, d: int, *, landmarks: int = 64, inverse_iters: int = 6, conv_kernel: int | None = 33, **_: object
) -> Cost:
    """Two kernels with the landmarks, their products with the values, the inverse and the convolution."""
    m = min(landmarks, n)
    flops = 8.0 * n * m * d + 8.0 * inverse_iters * m**3 + 2.0 * n * d * (conv_kernel or 0)
    return Cost(flops=flops, bytes=16.0 * n * d + 8.0 * n * m)


ENTRY = Entry(
    name="nystromformer",
    build=Nystromformer,
    summary="Nyström reconstruction of softmax from segment means.",
    citation="Xiong et al. 2021, Nyströmformer: A Nyström-Based Algorithm for Approximating Self-Attention",
    cost=cost,
    time="n",
    needs_equal_lengths=True,
)
