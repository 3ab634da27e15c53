"""The one interface of every attention mechanism, and what its registry entry declares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn


class Attention(nn.Module, ABC):
    """What happens between the projections of an attention layer.

    Args of `forward`:
        q: queries `(B, H, N, D)`. k: keys `(B, H, M, D)`. v: values `(B, H, M, Dv)`.
        key_mask, query_mask: boolean `(B, M)` and `(B, N)`, True = a real token. The contents of padded
            tokens never reach the output; rows of padded queries are zero.
        grid: `(rows, columns)` of the token grid for mechanisms with 2-D parts; inferred when square.

    Returns the mixed values `(B, H, N, Dv)` in the dtype of `q`.
    """

    def __init__(self, head_dim: int, num_heads: int) -> None:
        super().__init__()
        for name, value in (("head_dim", head_dim), ("num_heads", num_heads)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        self.head_dim = head_dim
        self.num_heads = num_heads

    @abstractmethod
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        *,
        grid: tuple[int, int] | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True)
class Cost:
    """Work of one head on one sample: floating-point operations and bytes moved or held (fp32)."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Entry:
    """A mechanism as the registry knows it: how to build it and what it promises.

    `cost(n, d, **options)` takes the sequence length, the head dimension and the mechanism's own options.
    """

    name: str
    build: Callable[..., Attention]
    summary: str
    citation: str
    cost: Callable[..., Cost]
    linear: bool = False  # time grows linearly with the number of tokens
    doubly_stochastic: bool = False  # rows and columns of the matrix sum to one
    is_matrix: bool = True  # the output is (a matrix that depends on q and k only) @ v
    causal_only: bool = False  # defined along the order of tokens
    stochastic: bool = False  # draws random numbers in forward, at evaluation too
    fixed_length: bool = False  # has parameters tied to a maximal length
    needs_equal_lengths: bool = False  # N = M: self-attention only
    needs_grid: bool = False  # 2-D parts: tokens must form a grid
