"""The arguments of a mechanism as one record."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .masking import zero_padding


class Inputs(NamedTuple):
    """The arguments of `Attention.forward`, checked; shapes and meanings are stated there."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None = None
    query_mask: Tensor | None = None
    grid: tuple[int, int] | None = None

    @property
    def allowed(self) -> Tensor | None:
        """The real keys as softmax attention takes them, `(B, 1, 1, M)`; None if all are."""
        return None if self.key_mask is None else self.key_mask[:, None, None, :]

    def cleaned(self, dtype: torch.dtype | None = None) -> Inputs:
        """With padded tokens as zeros; in this precision, if one is given."""
        q, k, v, key_mask, query_mask, grid = self
        if query_mask is not None:
            q = zero_padding(q, query_mask)
        if key_mask is not None:
            k, v = zero_padding(k, key_mask), zero_padding(v, key_mask)
        if dtype is not None:
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        return Inputs(q, k, v, key_mask, query_mask, grid)

    def after(self, prefix: int) -> Inputs:
        """The tokens after the first few; the grid is theirs already."""
        if not prefix:
            return self
        q, k, v, key_mask, query_mask, grid = self
        q, k, v = q[:, :, prefix:], k[:, :, prefix:], v[:, :, prefix:]
        key_mask = None if key_mask is None else key_mask[:, prefix:]
        query_mask = None if query_mask is None else query_mask[:, prefix:]
        return Inputs(q, k, v, key_mask, query_mask, grid)

    def finished(self, out: Tensor) -> Tensor:
        """An output `(B, H, N, Dv)` in the dtype of the queries, with zeros in the rows of padding."""
        return zero_padding(out.to(self.q.dtype), self.query_mask)
