"""Look into the attention of a trained ViT: what [CLS] reads, and which patches each pivot gathers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lotformer.attention.base import Attention
from lotformer.attention.lot import LOT


@torch.no_grad()
def cls_maps(model: nn.Module, pixels: Tensor, block: int = -1) -> Tensor:
    """The class token's attention to the patches of each image `(B, 3, H, W)`, mean over heads: `(B, rows, columns)`.

    Shares of the whole row; what it reads from special tokens is left out.
    """
    mechanism, (q, k), grid = _inside(model, pixels, block)
    tokens = k.shape[2]
    identity = torch.eye(tokens).expand(*q.shape[:2], -1, -1)  # values that show where they went
    special = getattr(mechanism, "prefix_tokens", 0)
    rows = mechanism.prefix(q[:, :, :special], k, identity) if special else mechanism(q, k, identity)  # type: ignore[operator]
    patches = grid[0] * grid[1]
    return rows[:, :, 0, tokens - patches :].mean(1).unflatten(-1, grid)


@torch.no_grad()
def key_clusters(model: nn.Module, pixels: Tensor, block: int = -1) -> Tensor:
    """The mass that each pivot sends to each patch: `(B, heads, R, rows, columns)`, with sum one per head.

    Raises:
        ValueError: the block does not have LOT attention.
    """
    mechanism, (q, k), grid = _inside(model, pixels, block)
    if not isinstance(mechanism, LOT):
        raise ValueError(f"pivots belong to LOT attention; this block has {type(mechanism).__name__}.")
    clusters = mechanism.coupling(q, k).key_clusters()
    patches = grid[0] * grid[1]
    return clusters[:, :, clusters.shape[2] - patches :].mT.unflatten(-1, grid)


def _inside(model: nn.Module, pixels: Tensor, block: int) -> tuple[Attention, tuple[Tensor, Tensor], tuple[int, int]]:
    """The mechanism of a block, its queries and keys for these images, and the grid of the patches."""
    blocks: Any = getattr(model, "blocks", None)
    if blocks is None or not isinstance(getattr(blocks[block].attn, "mechanism", None), Attention):
        raise ValueError("attention maps need a ViT of lotformer.models, e.g. lot_vit_half.")
    mechanism = blocks[block].attn.mechanism
    patches: Any = model.patch_embed
    with _watched(mechanism, patches.proj) as seen:
        model.eval()(pixels)
    return mechanism, (seen["q"], seen["k"]), (seen["patches"].shape[-2], seen["patches"].shape[-1])


@contextmanager
def _watched(mechanism: Attention, patches: nn.Module) -> Iterator[dict[str, Tensor]]:
    seen: dict[str, Tensor] = {}

    def note_patches(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        seen.update(patches=output)

    def note(_: nn.Module, args: tuple[Any, ...]) -> None:
        seen.update(q=args[0], k=args[1])

    handles = [mechanism.register_forward_pre_hook(note), patches.register_forward_hook(note_patches)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
