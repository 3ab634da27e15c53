"""Synthesizer: attention whose scores do not compare queries with keys."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..nn.checks import require_count
from ..nn.softmax import fused_softmax
from .base import Attention, Cost, Entry
from .inputs import Inputs
from .masking import zero_padding

Kind = Literal["random", "factorized", "dense"]


class Synthesizer(Attention):
    """`softmax(S) v` over the real keys, with scores S from positions, or from the query alone.

        random      S = R[:N, :M]             R (H, L, L) learned
        factorized  S = (R1 R2ᵀ)[:N, :M]      R1, R2 (H, L, hidden) learned
        dense       S_ij = relu(q_i W1 + b1) · W2_j + b2_j

    L is `max_length`; longer sequences are refused. Keys enter by their position only.
    """

    def __init__(
        self, head_dim: int, num_heads: int, *, kind: Kind = "factorized", max_length: int = 1024, hidden: int = 32
    ) -> None:
        super().__init__(head_dim, num_heads)
        if kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {', '.join(map(repr, get_args(Kind)))}, got {kind!r}.")
        for name, value in (("max_length", max_length), ("hidden", hidden)):
            require_count(name, value)
        self.kind = kind
        self.max_length = max_length
        if kind == "random":
            self.scores = nn.Parameter(torch.empty(num_heads, max_length, max_length))
            nn.init.normal_(self.scores, std=0.02)
        elif kind == "factorized":
            self.row_factor = nn.Parameter(torch.empty(num_heads, max_length, hidden))
            self.column_factor = nn.Parameter(torch.empty(num_heads, max_length, hidden))
            for factor in (self.row_factor, self.column_factor):
                nn.init.normal_(factor, std=0.02**0.5 * hidden**-0.25)  # the product has the spread of `random`
        else:
            self.inner = nn.Parameter(torch.empty(num_heads, head_dim, hidden))
            self.inner_bias = nn.Parameter(torch.zeros(num_heads, 1, hidden))
            self.outer = nn.Parameter(torch.empty(num_heads, max_length, hidden))
            self.outer_bias = nn.Parameter(torch.zeros(num_heads, max_length, 1))
            nn.init.normal_(self.inner, std=head_dim**-0.5)
            nn.init.normal_(self.outer, std=hidden**-0.5)

    def attend(self, inputs: Inputs) -> Tensor:
        q, k, v, key_mask, query_mask, *_ = inputs
        n, m = q.shape[2], k.shape[2]
        if max(n, m) > self.max_length:
            raise ValueError(f"synthesizer was built for max_length={self.max_length}, got {n} queries and {m} keys.")
        q, v = zero_padding(q, query_mask), zero_padding(v, key_mask)
        allowed = inputs.allowed
        if self.kind == "random":
            out = self._mix(self.scores[:, :n, :m], v, allowed)
        else:
            rows, columns = self._factors(q, n, m)
            batch = q.shape[0]
            rows, columns = (x.to(v.dtype).expand(batch, -1, -1, -1) for x in (rows, columns))
            out = fused_softmax(rows, columns, v, allowed, scale=1.0)
        return inputs.finished(out)

    def _factors(self, q: Tensor, n: int, m: int) -> tuple[Tensor, Tensor]:
        """Factors of the scores, so that the fused kernel can form them block by block."""
        if self.kind == "factorized":
            return self.row_factor[None, :, :n], self.column_factor[None, :, :m]
        inner = F.relu(q @ self.inner.to(q.dtype) + self.inner_bias.to(q.dtype))
        rows = torch.cat([inner, torch.ones_like(inner[..., :1])], -1)
        columns = torch.cat([self.outer, self.outer_bias], -1)[None, :, :m]
        return rows, columns

    def _mix(self, scores: Tensor, v: Tensor, allowed: Tensor | None) -> Tensor:
        if allowed is None:
            return scores.softmax(-1).to(v.dtype) @ v
        empty = ~allowed.any(-1, keepdim=True)
        weights = scores.masked_fill(~(allowed | empty), -torch.inf).softmax(-1)
        return (weights.to(v.dtype) @ v).masked_fill(empty, 0.0)


def cost(n: int, d: int, *, kind: Kind = "factorized", hidden: int = 32, **_: object) -> Cost:
    """Scores have to be softmaxed over n×n either way; only `random` reads them from memory."""
    if kind == "random":
        return Cost(flops=2.0 * n * n * d, bytes=8.0 * n * d + 8.0 * n * n)
    flops = 2.0 * n * n * (hidden + d) + (2.0 * n * d * hidden if kind == "dense" else 0.0)
    return Cost(flops=flops, bytes=8.0 * n * d + 8.0 * n * hidden)


ENTRY = Entry(
    name="synthesizer",
    build=Synthesizer,
    summary="Scores from positions (random, factorised) or from the query alone (dense).",
    citation="Tay et al. 2021, Synthesizer: Rethinking Self-Attention for Transformer Models",
    cost=cost,
    fixed_length=True,
)
