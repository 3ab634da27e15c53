"""Diagnosis of a mechanism's attention matrix: sums, entropy, rank, and the largest share of one token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import registry
from .base import Attention


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """Figures of an attention matrix A `(B, H, N, M)`, over real tokens.

    Attributes:
        row_sums: `(B, H, N)`. column_sums: `(B, H, M)`. Zero for padded tokens.
        entropy: `(B, H)`, mean over rows of the entropy of `|A_i| / Σ_j |A_ij|`, in nats: 0 looks at one token,
            log M at all alike.
        effective_rank: `(B, H)`, exponential of the entropy of the singular values divided by their sum.
        top_share: `(B, H)`, share of all mass `Σ |A|` that falls on the heaviest token: 1/M when columns are even,
            1 when every query looks at the same key.
    """

    row_sums: Tensor
    column_sums: Tensor
    entropy: Tensor
    effective_rank: Tensor
    top_share: Tensor

    def __repr__(self) -> str:
        """A line per figure, over all samples and heads, instead of pages of tensors."""
        shape = (*self.row_sums.shape, self.column_sums.shape[-1])
        lines = [f"{type(self).__name__} of {shape[0]} × {shape[1]} matrices of {shape[2]} × {shape[3]}"]
        for field in fields(self):
            values = getattr(self, field.name)
            least, mean, most = (f"{f(values).item():.4g}" if values.numel() else "-" for f in _SPREAD)
            lines.append(f"  {field.name + ':':<16}mean {mean}, from {least} to {most}")
        return "\n".join(lines)


_SPREAD: tuple[Callable[[Tensor], Tensor], ...] = (torch.amin, torch.mean, torch.amax)


@torch.no_grad()
def diagnose(
    mechanism: str | Attention,
    q: Tensor,
    k: Tensor,
    *,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    grid: tuple[int, int] | None = None,
    **options: Any,
) -> Diagnosis:
    """Diagnose the matrix that a mechanism makes of queries `(B, H, N, D)` and keys `(B, H, M, D)`.

    `mechanism` is a name, built with `options` and freshly initialised, or a module, used as it is in evaluation
    mode. Raises for mechanisms that are not one matrix per head.
    """
    a = attention_matrix(mechanism, q, k, key_mask=key_mask, query_mask=query_mask, grid=grid, **options)
    mass = a.abs()
    column_mass = mass.sum(-2)
    # padded rows are zero, and so is their entropy
    rows = a.shape[-2] if query_mask is None else query_mask.sum(-1).clamp_min(1)[:, None]
    return Diagnosis(
        row_sums=a.sum(-1),
        column_sums=a.sum(-2),
        entropy=_entropy(mass).sum(-1) / rows,
        effective_rank=_entropy(torch.linalg.svdvals(a)).exp(),
        top_share=column_mass.amax(-1) / _nonzero(column_mass.sum(-1)),
    )


@torch.no_grad()
def attention_matrix(
    mechanism: str | Attention,
    q: Tensor,
    k: Tensor,
    *,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    grid: tuple[int, int] | None = None,
    **options: Any,
) -> Tensor:
    """The matrix A `(B, H, N, M)` of a mechanism, arguments as in `diagnose`: what it does to one-hot values.

    At least fp32. Columns are read in groups as wide as a head, so that every mechanism sees values as it expects.
    """
    for name, x in (("q", q), ("k", k)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"`{name}`: expected a tensor (B, H, tokens, D), got {got}.")
    module = _module(mechanism, q, options)
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k = q.to(dtype), k.to(dtype)
    batch, heads, length, width = k.shape
    one_hot = F.pad(torch.eye(length, dtype=dtype, device=k.device), (0, -length % width))
    was_training = module.training
    module.eval()
    columns = []
    try:
        for values in one_hot.split(width, -1):
            # mechanisms that draw random numbers must draw the same ones for every group
            with torch.random.fork_rng([q.device] if q.is_cuda else []):
                spread = values.expand(batch, heads, length, width)
                columns.append(module(q, k, spread, key_mask, query_mask, grid=grid))
    finally:
        module.train(was_training)
    return torch.cat(columns, -1)[..., :length]


def _module(mechanism: str | Attention, q: Tensor, options: dict[str, Any]) -> Attention:
    if isinstance(mechanism, str):
        module = registry.build(mechanism, head_dim=q.shape[3], num_heads=q.shape[1], **options).to(q.device)
    elif options:
        raise ValueError(f"options ({', '.join(options)}) build a mechanism by name; a module has its own.")
    else:
        module = mechanism
    if not is_matrix(module):
        raise ValueError(
            f"{type(module).__name__} is not one matrix per head applied to the values, so there is nothing to "
            "diagnose; see `is_matrix` of its registry entry, and whether an option removes the part that is not."
        )
    return module


def is_matrix(module: Attention) -> bool:
    """True if this instance is a matrix: as it says itself if options decide, otherwise as its entry promises."""
    own: bool | None = getattr(module, "is_matrix", None)
    if own is not None:
        return own
    entries = (registry.entry(name) for name in registry.names())
    return next((entry.is_matrix for entry in entries if entry.build is type(module)), True)


def _entropy(weights: Tensor) -> Tensor:
    """Entropy of weights along the last dimension, brought to sum 1; zero where there are none."""
    p = weights / _nonzero(weights.sum(-1, keepdim=True))
    return torch.special.entr(p).sum(-1)


def _nonzero(x: Tensor) -> Tensor:
    return torch.where(x == 0, 1.0, x)
