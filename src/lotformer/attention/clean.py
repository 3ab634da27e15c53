"""Padding and precision, once, for mechanisms written as a formula on clean tokens."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from ..ops.reference import solve_dtype
from .base import Attention
from .masking import require_equal_lengths, zero_padding


class CleanAttention(Attention):
    """A mechanism that implements `mix` and never meets padded content or half precision.

    `mix` receives padded tokens as zeros and everything in fp32 (fp64 for fp64 inputs) with autocast off. It must
    leave padded keys out of its sums; rows of padded queries, and samples without keys, are zeroed here.
    """

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
        if q.shape[2] == 0 or k.shape[2] == 0:
            return q[..., :0] @ q.new_zeros(0, v.shape[3])  # nothing to write or nothing to read
        dtype = solve_dtype(q)
        with torch.autocast(q.device.type, enabled=False):
            out = self.mix(
                zero_padding(q, query_mask).to(dtype),
                zero_padding(k, key_mask).to(dtype),
                zero_padding(v, key_mask).to(dtype),
                key_mask,
                query_mask,
                grid,
            )
        if key_mask is not None:
            out = out.masked_fill(~key_mask.any(-1)[:, None, None, None], 0.0)
        return zero_padding(out, query_mask).to(q.dtype)

    @abstractmethod
    def mix(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        grid: tuple[int, int] | None,
    ) -> Tensor:
        """The mechanism's formula on clean tokens: `(B, H, N, Dv)` in the dtype of `q`."""

    def why_equal_lengths(self) -> str | None:
        """Why this instance is defined for self-attention only, or None if it is not."""
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
        for label, mask, x in (("key_mask", key_mask, k), ("query_mask", query_mask, q)):
            if mask is None:
                continue
            if mask.dtype != torch.bool:
                raise ValueError(f"{label} must be boolean, True = a real token, got {mask.dtype}: use mask.bool().")
            if mask.shape != (x.shape[0], x.shape[2]):
                raise ValueError(f"{label} must be {(x.shape[0], x.shape[2])}, got {tuple(mask.shape)}.")
        reason = self.why_equal_lengths()
        if reason is not None:
            require_equal_lengths(q, k, name, reason)
