"""Feature maps and their parameters that several kernel mechanisms share."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .checks import require_count
from .depthwise import square_grid

Init = Literal["identity", "random"]


class HeadwiseLinear(nn.Module):
    """`x W_h + b_h` with one matrix per head, on tokens `(B, H, N, in)`.

    `init="identity"` starts as a copy of the input (square maps only), "random" as `nn.Linear` does.
    """

    def __init__(self, num_heads: int, in_dim: int, out_dim: int, *, bias: bool = True, init: Init = "random") -> None:
        super().__init__()
        if init == "identity" and in_dim != out_dim:
            raise ValueError(f"an identity map keeps its dimension, got {in_dim} to {out_dim}.")
        self.init = init
        self.weight = nn.Parameter(torch.empty(num_heads, in_dim, out_dim))
        self.bias = nn.Parameter(torch.empty(num_heads, 1, out_dim)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.weight.shape[1])
        if self.init == "identity":
            with torch.no_grad():
                self.weight.copy_(torch.eye(self.weight.shape[1]).expand_as(self.weight))
        else:
            nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias) if self.init == "identity" else nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.weight.to(x.dtype)
        return out if self.bias is None else out + self.bias.to(x.dtype)


class ChannelScale(nn.Module):
    """`x / softplus(scale)` with one learned scale per channel, zero at the start."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(num_heads, 1, head_dim))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return x / F.softplus(self.scale.to(x.dtype))


class TokenPositions(nn.Module):
    """A learned vector per position added to the keys, zero at the start.

    Args:
        num_tokens: a number of tokens, of which there may be fewer; or the `(rows, columns)` of a grid, whose vectors
            are resampled for grids of other shapes.
    """

    def __init__(self, num_heads: int, num_tokens: int | tuple[int, int], head_dim: int) -> None:
        super().__init__()
        self.grid = num_tokens if isinstance(num_tokens, tuple) else None
        sides = num_tokens if isinstance(num_tokens, tuple) else (num_tokens,)
        for count in sides:
            require_count("num_tokens", count)
        self.table = nn.Parameter(torch.zeros(num_heads, math.prod(sides), head_dim))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.table)

    def forward(self, x: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        if self.grid is None:
            if x.shape[2] > self.table.shape[1]:
                raise ValueError(
                    f"positions were made for at most {self.table.shape[1]} tokens, got {x.shape[2]}: build with "
                    "a larger num_tokens."
                )
            return x + self.table[:, : x.shape[2]].to(x.dtype)
        if grid is None and x.shape[2] == self.table.shape[1]:
            grid = self.grid
        return x + self._resampled(square_grid(x.shape[2], grid), self.grid, x.dtype)

    def _resampled(self, grid: tuple[int, int], made: tuple[int, int], dtype: torch.dtype) -> Tensor:
        table = self.table.to(dtype)
        if grid == made:
            return table
        return F.interpolate(table.mT.unflatten(2, made), grid, mode="bicubic", antialias=True).flatten(2).mT


def exponential_features(log_q: Tensor, log_k: Tensor, key_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`exp(log_q)` and `exp(log_k)` up to factors that cancel in normalised linear attention.

    Each feature of the keys is divided by its maximum over the real keys, which is given back on the queries'
    side, and each query by its maximum over features. The normaliser is then at least 1 whatever the inputs, with
    no ε that would bias the kernel. Shapes `(B, H, N, F)` and `(B, H, M, F)`.
    """
    if key_mask is not None:
        log_k = log_k.masked_fill(~key_mask[:, None, :, None], -torch.inf)
    largest = log_k.detach().amax(-2, keepdim=True)
    largest = torch.where(largest.isfinite(), largest, 0.0)  # a sample without keys
    log_q = log_q + largest
    return (log_q - log_q.detach().amax(-1, keepdim=True)).exp(), (log_k - largest).exp()
