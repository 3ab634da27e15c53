"""A workload: a mechanism on random tokens, forward or forward and backward."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lotformer.attention import build, entry


@dataclass(frozen=True)
class Shape:
    """Size of the tokens: `(batch, heads, n, head_dim)`."""

    n: int
    batch: int = 1
    heads: int = 4
    head_dim: int = 64

    def __str__(self) -> str:
        return f"B{self.batch} H{self.heads} N{self.n} D{self.head_dim}"


TARGET_SHAPES = (
    Shape(197, batch=16, heads=3),
    Shape(1024, batch=4, heads=4),
    Shape(4096, batch=1, heads=4),
    Shape(16384, batch=1, heads=4),
)
"""An image model, and texts of growing length: where LOT has to be fast."""


@dataclass(frozen=True)
class Workload:
    """One mechanism on one shape. "sdpa" stands for PyTorch's fused softmax without any module around it."""

    mechanism: str
    shape: Shape
    backward: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def module(self) -> nn.Module | None:
        if self.mechanism == "sdpa":
            return None
        options = dict(self.options)
        if "max_length" in inspect.signature(entry(self.mechanism).build).parameters:
            options.setdefault("max_length", self.shape.n)
        torch.manual_seed(self.seed)
        made = build(self.mechanism, head_dim=self.shape.head_dim, num_heads=self.shape.heads, **options)
        return made.train(self.backward)

    def tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        s = self.shape
        q, k, v = (torch.randn(s.batch, s.heads, s.n, s.head_dim, generator=generator) for _ in range(3))
        for x in (q, k, v):
            x.requires_grad_(self.backward)
        return q, k, v

    def forward(self, module: nn.Module | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        if module is None:
            return F.scaled_dot_product_attention
        if not entry(self.mechanism).needs_grid:
            return module
        grid = near_square(self.shape.n)
        return lambda q, k, v: module(q, k, v, grid=grid)

    def prepare(self, tokens: tuple[Tensor, Tensor, Tensor] | None = None) -> Callable[[], object]:
        """A call that does the work once; gradients are dropped between calls."""
        q, k, v = self.tokens() if tokens is None else tokens
        module = self.module()
        forward = self.forward(module)
        if not self.backward:

            def run() -> object:
                with torch.no_grad():
                    return forward(q, k, v)

            return run
        learned = [] if module is None else [p for p in module.parameters() if p.requires_grad]
        upstream = torch.ones_like(v)

        def run_both() -> object:
            return torch.autograd.grad(forward(q, k, v), [q, k, v, *learned], upstream, allow_unused=True)

        return run_both


def near_square(n: int) -> tuple[int, int]:
    """The most square grid of n tokens."""
    rows = next(r for r in range(int(n**0.5), 0, -1) if n % r == 0)
    return rows, n // rows
