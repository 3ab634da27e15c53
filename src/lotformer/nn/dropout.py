"""Dropout that does not cost more than the layer before it on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ByteDropout(nn.Dropout):
    """`nn.Dropout` with one random byte per element on a CPU, where PyTorch draws a whole number for each.

    The probability is rounded to a multiple of 1/256 there (0.1 becomes 26/256); the scale is that of the rounded one,
    so the mean is kept exactly. Elsewhere it is `nn.Dropout`.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0 or x.device.type != "cpu" or x.numel() == 0:
            return super().forward(x)
        kept = 256 - round(256 * self.p)
        if kept == 0:
            return super().forward(x)
        # over the whole range of int64, so that each of its eight bytes is uniform
        drawn = torch.empty(-(-x.numel() // 8), dtype=torch.int64).random_(-(2**63), None)
        bytes_ = drawn.view(torch.uint8)[: x.numel()].view(x.shape)
        return x * (bytes_ < kept).to(x.dtype).mul_(256 / kept)
