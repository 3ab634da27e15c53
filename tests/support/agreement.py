"""A function in fp32, as it runs natively, against itself in fp64, as PyTorch's operators define it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Function = Callable[..., Tensor]


def with_gradients(function: Function, inputs: Sequence[Tensor | None], dtype: torch.dtype) -> list[Tensor]:
    """The output and the gradients of all inputs, which may be missing, for one random cotangent."""
    leaves = [None if x is None else x.detach().to(dtype).requires_grad_() for x in inputs]
    out = function(*leaves)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    return [out.detach(), *torch.autograd.grad(out, [x for x in leaves if x is not None], cotangent)]


def assert_native_agrees(function: Function, inputs: Sequence[Tensor | None], tolerance: float = 5e-6) -> None:
    """Values and gradients, relative to the norm; what nearly vanishes is measured against the largest."""
    got = with_gradients(function, inputs, torch.float32)
    expected = with_gradients(function, inputs, torch.float64)
    least = 0.05 * max(want.norm() for want in expected).clamp_min(1e-30)  # all zero where all is padding
    for position, (have, want) in enumerate(zip(got, expected, strict=True)):
        error = ((have - want).norm() / torch.maximum(want.norm(), least)).item()
        assert error <= tolerance, f"number {position}: relative error {error:.2e}"


def in_layout(x: Tensor, layout: str) -> Tensor:
    """The same `(B, H, N, D)` numbers with contiguous heads, with contiguous tokens, or as part of wider rows."""
    if layout == "heads":
        return x.contiguous()
    if layout == "tokens":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    batch, heads, length, dim = x.shape
    wide = x.new_full((batch, length, 2 * heads * dim + 3), torch.nan)
    part = wide[..., 3 : 3 + heads * dim].unflatten(-1, (heads, dim)).transpose(1, 2)
    return part.copy_(x)
