"""Local attention: softmax inside non-overlapping blocks of tokens."""

from __future__ import annotations

from torch import Tensor

from ..nn.checks import require_count
from .base import Attention, Cost, Entry
from .blocks import attend_blocks, into_blocks, mask_into_blocks
from .inputs import Inputs
from .masking import require_equal_lengths


class LocalAttention(Attention):
    """Token i attends by softmax to the real tokens j with `i // block_size == j // block_size`.

    The last block may be shorter; scores are `q·k D^-1/2`.
    """

    def __init__(self, head_dim: int, num_heads: int, *, block_size: int = 64) -> None:
        super().__init__(head_dim, num_heads)
        require_count("block_size", block_size)
        self.block_size = block_size

    def attend(self, inputs: Inputs) -> Tensor:
        q, k, v, key_mask, *_ = inputs.cleaned()
        require_equal_lengths(q, k, "local")
        length, size = q.shape[2], min(self.block_size, max(q.shape[2], 1))
        allowed = None
        if key_mask is not None or length % size:
            allowed = mask_into_blocks(key_mask, k, size)[:, :, None, :]
        out = attend_blocks(into_blocks(q, size), into_blocks(k, size), into_blocks(v, size), allowed)
        return inputs.finished(out.flatten(2, 3)[:, :, :length])


def cost(n: int, d: int, *, block_size: int = 64, **_: object) -> Cost:
    return Cost(flops=4.0 * n * min(block_size, n) * d, bytes=16.0 * n * d)


ENTRY = Entry(
    name="local",
    build=LocalAttention,
    summary="Softmax inside non-overlapping blocks of tokens.",
    citation="Tay et al. 2021, Long Range Arena (local attention)",
    cost=cost,
    time="n",
    needs_equal_lengths=True,
)
