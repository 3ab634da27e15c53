"""BigBird attention: softmax over a window of blocks, two global blocks and a few random ones."""

from __future__ import annotations

import torch
from torch import Tensor

from ..nn.checks import require_count
from ..nn.softmax import fused_softmax
from .base import Attention, Cost, Entry
from .blocks import attend_blocks, into_blocks, mask_into_blocks
from .inputs import Inputs
from .masking import require_equal_lengths

_PLAN_PERIOD = 4096  # rows of the stored random plan; longer sequences use it again


class BigBird(Attention):
    """Block-sparse softmax attention.

    A block of queries attends to the first and the last block, to itself and its two neighbours, and to up to
    `random_blocks` further ones; the first and the last block attend to everything. Any length works: the last
    block may be short, and for a padded sample it is the one that holds its last real token.

    The random blocks are drawn once, one from each of `random_blocks` equal parts of the sequence, and those that
    are attended to already are dropped (the public code draws again instead).

    Args:
        block_size: tokens in a block. random_blocks: blocks drawn for each block of queries. seed: of the draw.
    """

    plan: Tensor

    def __init__(
        self, head_dim: int, num_heads: int, *, block_size: int = 64, random_blocks: int = 3, seed: int = 0
    ) -> None:
        super().__init__(head_dim, num_heads)
        require_count("block_size", block_size)
        require_count("random_blocks", random_blocks, least=0)
        self.block_size = block_size
        self.random_blocks = random_blocks
        draw = torch.rand(_PLAN_PERIOD, random_blocks, generator=torch.Generator().manual_seed(seed))
        parts = (torch.arange(random_blocks) + draw) / max(random_blocks, 1)
        self.register_buffer("plan", parts)  # where in the sequence, as a fraction of its blocks

    def attend(self, inputs: Inputs) -> Tensor:
        q, k, v, key_mask, *_ = inputs.cleaned()
        require_equal_lengths(q, k, "bigbird")
        batch, length = q.shape[0], q.shape[2]
        size = self.block_size
        query_blocks, key_blocks, value_blocks = (into_blocks(x, size) for x in (q, k, v))
        real = mask_into_blocks(key_mask, k, size).expand(batch, -1, -1)
        chosen, counted, last = self.blocks(length, key_mask, q.device)
        blocks = query_blocks.shape[2]

        rows = (chosen.expand(batch, -1, -1) + blocks * torch.arange(batch, device=q.device)[:, None, None]).flatten()

        def gather(x: Tensor) -> Tensor:
            """The chosen blocks side by side: `(B, T, …)` to `(B, T, chosen, …)`."""
            return x.flatten(0, 1).index_select(0, rows).unflatten(0, (batch, blocks, -1))

        keys, values = (gather(x.transpose(1, 2)).movedim(3, 1).flatten(3, 4) for x in (key_blocks, value_blocks))
        allowed = (gather(real) & counted[..., None]).flatten(2)[:, :, None, :]
        out = attend_blocks(query_blocks, keys, values, allowed)

        last_index = last.expand(batch)[:, None, None, None, None]
        last_block = torch.take_along_dim(query_blocks, last_index, 2).squeeze(2)
        ends = fused_softmax(torch.cat([query_blocks[:, :, 0], last_block], 2), k, v, inputs.allowed)
        first_out, last_out = ends.unflatten(2, (2, size)).unbind(2)
        index = torch.arange(blocks, device=q.device)[:, None, None]
        out = torch.where(index == last_index, last_out[:, :, None], out)
        out = torch.where(index == 0, first_out[:, :, None], out)
        return inputs.finished(out.flatten(2, 3)[:, :, :length])

    def blocks(self, length: int, key_mask: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Blocks seen by each block, and whether they count, `(B or 1, T, 5 + random)`; the last block, `(B or 1)`."""
        total = -(-length // self.block_size)
        if key_mask is None:
            used = torch.full((1,), length, device=device)
        else:
            used = (key_mask * torch.arange(1, length + 1, device=device)).amax(-1)
        last = ((used + self.block_size - 1) // self.block_size - 1).clamp_min(0)
        own = torch.arange(total, device=device)
        drawn = (self.plan[own % _PLAN_PERIOD] * (last + 1)[:, None, None]).long()
        window = torch.stack([own - 1, own, own + 1], -1).expand(last.shape[0], -1, -1)
        ends = torch.stack([torch.zeros_like(last), last], -1)[:, None].expand(-1, total, -1)
        chosen = torch.cat([ends, window, drawn], -1)
        seen_before = torch.tril(chosen[..., :, None] == chosen[..., None, :], -1).any(-1)
        counted = (chosen >= 0) & (chosen <= last[:, None, None]) & ~seen_before
        return chosen.clamp(0, total - 1), counted, last


def cost(n: int, d: int, *, block_size: int = 64, random_blocks: int = 3, **_: object) -> Cost:
    """Every block meets 5 + random blocks of keys, laid out for it; two blocks of queries meet all keys."""
    chosen = 5 + random_blocks
    keys = min(chosen * block_size, n)
    return Cost(flops=4.0 * n * (keys + 2 * block_size) * d, bytes=(16.0 + 8.0 * chosen) * n * d)


ENTRY = Entry(
    name="bigbird",
    build=BigBird,
    summary="Block-sparse softmax: a window, two global blocks and a few random ones.",
    citation="Zaheer et al. 2020, Big Bird: Transformers for Longer Sequences",
    cost=cost,
    time="n",
    needs_equal_lengths=True,
)
