"""Kernelized attention: a Gaussian kernel between queries and keys in place of softmax."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Cost, Entry
from .clean import CleanAttention
from .inputs import Inputs


class KernelizedAttention(CleanAttention):
    """`A_ij = exp(−|q_i − k_j|² / (2 √D))`, not normalised; `out = A v`.

    Runs on the fused softmax kernel, so the matrix is never stored: one more key of score 0 turns the row sum into
    `1 + Σ_j A_ij`, and an indicator column of the values reads `1 / (1 + Σ_j A_ij)`, by which the rest is divided.
    Scores are never positive, so that the added key loses no precision.
    """

    def mix(self, inputs: Inputs) -> Tensor:
        q, k, v, key_mask, *_ = inputs
        batch, heads, length, _ = k.shape
        scale = self.head_dim**-0.25
        q, k = q * scale, k * scale
        q_sizes, k_sizes = (-0.5 * x.square().sum(-1, keepdim=True) for x in (q, k))
        # [q, |q|²-term, 1] · [k, 1, |k|²-term] is the exponent; the key of zeros scores 0
        queries = torch.cat([q, q_sizes, torch.ones_like(q_sizes)], -1)
        keys = F.pad(torch.cat([k, torch.ones_like(k_sizes), k_sizes], -1), (0, 0, 0, 1))
        # equal widths of keys and values are what the fused CPU kernel takes
        spare = max(0, keys.shape[-1] - v.shape[-1] - 1)
        indicator = v.new_zeros(batch, heads, length + 1, 1 + spare)
        indicator[:, :, length, 0] = 1.0
        values = torch.cat([F.pad(v, (0, 0, 0, 1)), indicator], -1)
        allowed = None if key_mask is None else F.pad(key_mask, (0, 1), value=True)[:, None, None, :]
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=allowed, scale=1.0)
        dim = v.shape[-1]
        return mixed[..., :dim] / mixed[..., dim : dim + 1]


def cost(n: int, d: int, **_: object) -> Cost:
    return Cost(flops=4.0 * n * n * d, bytes=16.0 * n * d)


ENTRY = Entry(
    name="kernelized",
    build=KernelizedAttention,
    summary="Unnormalised Gaussian kernel between queries and keys.",
    citation="Chen et al. 2021, Skyformer: Remodel Self-Attention with Gaussian Kernel and Nyström Method",
    cost=cost,
)
