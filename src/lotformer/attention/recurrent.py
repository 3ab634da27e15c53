"""The base of recurrent mechanisms: both directions from one causal rule."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def run_directions(causal: Callable[..., Tensor], tokens: tuple[Tensor, ...], bidirectional: bool) -> Tensor:
    """`causal(*tokens)`, or its mean with the same rule run from the end; tokens lie along dimension 2."""
    if not bidirectional:
        return causal(*tokens)
    # both ways in one batch: half as many steps
    forward, backward = causal(*(torch.cat([x, x.flip(2)]) for x in tokens)).chunk(2)
    return 0.5 * (forward + backward.flip(2))


def require_value_width(v: Tensor, head_dim: int, name: str) -> None:
    """Raise when the values are not as wide as the channels that the block's own parameters were made for."""
    if v.shape[-1] != head_dim:
        raise ValueError(
            f"{name} has parameters for values of width head_dim={head_dim}, got {v.shape[-1]}. "
            "Project the values to head_dim, or switch off the convolution, the norm and the gate."
        )


def lower_triangle(size: int, like: Tensor, diagonal: int = 0) -> Tensor:
    """Boolean `(size, size)`: True where the row may see the column."""
    return torch.ones(size, size, dtype=torch.bool, device=like.device).tril(diagonal)
