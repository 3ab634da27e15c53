"""Linformer: softmax attention over learned combinations of the keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..nn.checks import require_count
from .base import Cost, Entry
from .clean import CleanAttention
from .inputs import Inputs


class Linformer(CleanAttention):
    """`softmax(D^-1/2 q (E k)ᵀ) (F v)` with learned `E, F (H, rank, max_length)` drawn from N(0, 1/rank).

    Padded keys and values enter the combinations as zeros, so that a right-padded sequence equals the truncated one.

    Args:
        rank: number of combinations. max_length: longest sequence of keys.
        share_key_value: use one matrix for keys and values.
    """

    def __init__(
        self, head_dim: int, num_heads: int, *, rank: int = 128, max_length: int = 4096, share_key_value: bool = False
    ) -> None:
        super().__init__(head_dim, num_heads)
        for name, value in (("rank", rank), ("max_length", max_length)):
            require_count(name, value)
        self.max_length = max_length
        self.key_projection = nn.Parameter(torch.empty(num_heads, rank, max_length))
        self.value_projection = None if share_key_value else nn.Parameter(torch.empty(num_heads, rank, max_length))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for projection in self.parameters():
            nn.init.normal_(projection, std=projection.shape[1] ** -0.5)

    def mix(self, inputs: Inputs) -> Tensor:
        q, k, v, *_ = inputs
        length = k.shape[2]
        if length > self.max_length:
            raise ValueError(
                f"this Linformer was built for at most {self.max_length} keys, got {length}: build it with a larger "
                "max_length."
            )
        value_projection = self.key_projection if self.value_projection is None else self.value_projection
        keys = self.key_projection[..., :length].to(q.dtype) @ k
        values = value_projection[..., :length].to(q.dtype) @ v
        return F.scaled_dot_product_attention(q, keys, values)


def cost(n: int, d: int, *, rank: int = 128, **_: object) -> Cost:
    """Two combinations of n tokens and attention of n queries over the results."""
    return Cost(flops=8.0 * n * rank * d, bytes=16.0 * n * d + 8.0 * n * rank)


ENTRY = Entry(
    name="linformer",
    build=Linformer,
    summary="Softmax over learned combinations of the keys.",
    citation="Wang et al. 2020, Linformer: Self-Attention with Linear Complexity",
    cost=cost,
    time="n",
    fixed_length=True,
)
