"""The one interface of every attention mechanism, and what its registry entry declares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ..nn.checks import require_count
from .inputs import Inputs
from .masking import require_equal_lengths


class Attention(nn.Module, ABC):
    """The computation between the projections of an attention layer.

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
            require_count(name, value)
        self.head_dim = head_dim
        self.num_heads = num_heads

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        *,
        grid: tuple[int, int] | None = None,
    ) -> Tensor:
        self._check(q, k, v, key_mask, query_mask)
        if q.shape[0] == 0 or q.shape[2] == 0 or k.shape[2] == 0:
            return q[..., :0] @ q.new_zeros(0, v.shape[3])  # nothing to write or nothing to read
        return self.attend(Inputs(q, k, v, key_mask, query_mask, grid))

    @abstractmethod
    def attend(self, inputs: Inputs) -> Tensor:
        """The mixed values `(B, H, N, Dv)`, as `forward` returns them.

        `forward` has checked the inputs; there is at least one token a side. A mechanism that is a formula on clean
        tokens can implement `mix` of `CleanAttention` instead.
        """

    @property
    def is_causal(self) -> bool:
        """True if a token sees only those before it."""
        return False

    def why_equal_lengths(self) -> str | None:
        """The reason why this instance is defined for self-attention only, or None if it is not."""
        return None

    def _check(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, query_mask: Tensor | None) -> None:
        name, expected = type(self).__name__, (self.num_heads, self.head_dim)
        for x, kind in ((q, "queries"), (k, "keys")):
            if x.dim() != 4 or (x.shape[1], x.shape[3]) != expected:
                raise ValueError(
                    f"{name} was built for {self.num_heads} heads of dimension {self.head_dim}: expected {kind} "
                    f"(B, {self.num_heads}, tokens, {self.head_dim}), got {tuple(x.shape)}."
                )
        if k.shape[:3] != v.shape[:3]:
            raise ValueError(f"keys and values must come in pairs, got {tuple(k.shape)} and {tuple(v.shape)}.")
        self._check_masks(q, k, key_mask, query_mask)
        reason = self.why_equal_lengths()
        if reason is not None:
            require_equal_lengths(q, k, name, reason)

    @staticmethod
    def _check_masks(q: Tensor, k: Tensor, key_mask: Tensor | None, query_mask: Tensor | None) -> None:
        for label, mask, x in (("key_mask", key_mask, k), ("query_mask", query_mask, q)):
            if mask is None:
                continue
            if mask.dtype != torch.bool:
                raise ValueError(f"{label} must be boolean, True = a real token, got {mask.dtype}: use mask.bool().")
            if mask.shape != (x.shape[0], x.shape[2]):
                raise ValueError(f"{label} must be {(x.shape[0], x.shape[2])}, got {tuple(mask.shape)}.")


Growth = Literal["n", "n log n", "n²", "n³"]
Promise = Literal["exact", "converged"]


@dataclass(frozen=True)
class Cost:
    """Work of one head on one sample: floating-point operations and bytes moved or held (fp32)."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Entry:
    """A mechanism as the registry knows it: how to build it and what it promises.

    `cost(n, d, **options)` takes the sequence length, the head dimension and the mechanism's own options. What
    depends on options is said for the defaults. An "exact" promise always holds; "converged" mechanisms iterate
    towards it, and how near they come depends on the number of iterations.
    """

    name: str
    build: Callable[..., Attention]
    summary: str
    citation: str
    cost: Callable[..., Cost]
    time: Growth = "n²"  # how time grows with the number of tokens
    doubly_stochastic: Promise | None = None  # rows and columns of the matrix sum to one
    is_matrix: bool = True  # the output is (a matrix that depends on q and k only) @ v
    causal_only: str | None = None  # the option with which it only looks back; without it, it looks both ways
    stochastic: bool = False  # draws random numbers in forward, at evaluation too
    fixed_length: bool = False  # has parameters tied to a maximal length
    needs_equal_lengths: bool = False  # N = M: self-attention only
    needs_grid: bool = False  # 2-D parts: tokens must form a grid

    @property
    def linear(self) -> bool:
        """True if time grows linearly with the number of tokens, up to a logarithm."""
        return self.time in ("n", "n log n")
