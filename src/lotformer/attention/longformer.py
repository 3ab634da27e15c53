"""Longformer attention: softmax in a sliding window, with a few global tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..nn.checks import require_count
from ..nn.softmax import fused_softmax
from .base import Attention, Cost, Entry
from .blocks import attend_blocks, into_blocks
from .inputs import Inputs
from .masking import require_equal_lengths


class Longformer(Attention):
    """Token i attends by softmax to the real tokens j with `|i - j| <= window / 2`, `j < G` or `i < G`.

    The first `global_tokens` = G tokens see everything and are seen by everyone. The publication gives them
    projections of their own; here projections belong to the host, so they share the ordinary ones.

    Args:
        window: width of the window, both sides together (even). global_tokens: G, none by default.
    """

    def __init__(self, head_dim: int, num_heads: int, *, window: int = 512, global_tokens: int = 0) -> None:
        super().__init__(head_dim, num_heads)
        if window < 2 or window % 2:
            raise ValueError(f"window must be even and at least 2: as many tokens on each side; got {window}.")
        require_count("global_tokens", global_tokens, least=0)
        self.reach = window // 2
        self.global_tokens = global_tokens

    def attend(self, inputs: Inputs) -> Tensor:
        q, k, v, key_mask, *_ = inputs.cleaned()
        require_equal_lengths(q, k, "longformer")
        everything = inputs.allowed
        if q.shape[2] <= self.reach + 1:
            return inputs.finished(fused_softmax(q, k, v, everything))
        out = self._windows(q, k, v, key_mask)
        if self.global_tokens:
            rows = fused_softmax(q[:, :, : self.global_tokens], k, v, everything)
            out = torch.cat([rows, out[:, :, self.global_tokens :]], 2)
        return inputs.finished(out)

    def _windows(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        """Blocks of `reach` queries attend to their own block of keys and its two neighbours, cut to the band."""
        length, reach = q.shape[2], self.reach
        blocks = -(-length // reach)
        query_blocks = into_blocks(q, reach)
        key_windows, value_windows = (self._gather(x, blocks) for x in (k, v))

        def run(start: int, stop: int, masks: int) -> Tensor:
            allowed = self._allowed(torch.arange(start, start + masks, device=q.device), length, key_mask)
            part = slice(start, stop)
            return attend_blocks(query_blocks[:, :, part], key_windows[:, :, part], value_windows[:, :, part], allowed)

        if key_mask is not None:
            return run(0, blocks, blocks).flatten(2, 3)[:, :, :length]
        # away from the ends every block has the same mask: one is made for all
        first = min(1 + -(-self.global_tokens // reach), blocks)
        last = max(length // reach - 1, first)
        parts = [run(0, first, first)]
        if last > first:
            parts.append(run(first, last, 1))
        if last < blocks:
            parts.append(run(last, blocks, blocks - last))
        return torch.cat(parts, 2).flatten(2, 3)[:, :, :length]

    def _gather(self, x: Tensor, blocks: int) -> Tensor:
        """Global tokens and the three blocks of every window, `(B, H, T, G + 3·reach, D)`."""
        batch, heads, length, width = x.shape
        reach = self.reach
        padded = F.pad(x, (0, 0, reach, (blocks + 1) * reach - length))
        windows = padded.unfold(2, 3 * reach, reach).transpose(-1, -2)
        if not self.global_tokens:
            return windows
        seen = x[:, :, None, : self.global_tokens].expand(batch, heads, blocks, -1, width)
        return torch.cat([seen, windows], 3)

    def _allowed(self, block: Tensor, length: int, key_mask: Tensor | None) -> Tensor:
        """`(B or 1, T, reach, G + 3·reach)`: inside the band and the sequence, real, and not counted twice."""
        reach, seen_by_all = self.reach, min(self.global_tokens, length)
        offset = torch.arange(3 * reach, device=block.device) - reach
        band = (torch.arange(reach, device=block.device)[:, None] - offset).abs() <= reach
        key = block[:, None] * reach + offset
        real = ((key >= seen_by_all) & (key < length))[None]
        if key_mask is not None:
            real = real & key_mask[:, key.clamp(0, length - 1)]
        allowed = band & real[:, :, None, :]
        if not seen_by_all:
            return allowed
        seen = allowed.new_ones((1, seen_by_all)) if key_mask is None else key_mask[:, :seen_by_all]
        return torch.cat([seen[:, None, None, :].expand(*allowed.shape[:3], -1), allowed], 3)


def cost(n: int, d: int, *, window: int = 512, global_tokens: int = 0, **_: object) -> Cost:
    """Blocks of half a window meet three such blocks of keys; keys and values are laid out once per window."""
    keys = min(1.5 * window, n) + global_tokens
    return Cost(flops=4.0 * n * keys * d + 4.0 * global_tokens * n * d, bytes=(16.0 + 24.0) * n * d)


ENTRY = Entry(
    name="longformer",
    build=Longformer,
    summary="Softmax in a sliding window, with optional global tokens in front.",
    citation="Beltagy et al. 2020, Longformer: The Long-Document Transformer",
    cost=cost,
    time="n",
    needs_equal_lengths=True,
)
