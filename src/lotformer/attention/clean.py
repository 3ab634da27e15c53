"""Padding and precision, once, for mechanisms written as a formula on clean tokens."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from ..ops.precision import no_autocast
from ..ops.reference import solve_dtype
from .base import Attention
from .masking import zero_padding


class CleanAttention(Attention):
    """A mechanism that implements `mix` and never meets padded content or half precision.

    `mix` receives padded tokens as zeros and everything in fp32 (fp64 for fp64 inputs) with autocast off. It must
    leave padded keys out of its sums; rows of padded queries, and samples without keys, are zeroed here.
    """

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        *,
        grid: tuple[int, int] | None = None,
    ) -> Tensor:
        dtype = solve_dtype(q)
        with no_autocast(q.device.type):
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
