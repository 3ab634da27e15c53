"""The short causal convolution in front of recurrent mechanisms."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class ShortConv(nn.Module):
    """SiLU of a depthwise causal convolution along the tokens of `(B, H, N, D)`; every channel has its own kernel."""

    def __init__(self, channels: int, size: int, *, bias: bool = False) -> None:
        super().__init__()
        if size < 1:
            raise ValueError(f"the kernel of a short convolution must have at least 1 tap, got {size}.")
        self.conv = nn.Conv1d(channels, channels, size, groups=channels, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, heads, length, dim = x.shape
        channels_first = x.transpose(2, 3).reshape(batch, heads * dim, length)
        kernel = self.conv.weight.to(x.dtype)
        bias = None if self.conv.bias is None else self.conv.bias.to(x.dtype)
        padded = F.pad(channels_first, (kernel.shape[-1] - 1, 0))
        mixed = F.silu(F.conv1d(padded, kernel, bias, groups=heads * dim))
        return mixed.reshape(batch, heads, dim, length).transpose(2, 3)
