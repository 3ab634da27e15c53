"""From the attention masks of other libraries to a mask of keys, or a refusal."""

from __future__ import annotations

import torch
from torch import Tensor

_NOT_PADDING = (
    "the attention mask is not a pure padding mask: {why}. A converted layer lets every real token see every real "
    "token; causal, windowed and block masks and additive position biases cannot be converted. "
    "Leave such layers out with `layers=`."
)


def key_mask_from(mask: Tensor | None, batch: int, queries: int, keys: int) -> Tensor | None:
    """Boolean key mask `(B, M)`, True = a real token, from whatever a host model passes around.

    Args:
        mask: None; 2-D `(B, M)` with true or non-zero for real tokens (or additive: 0 and a large negative number);
            4-D `(B or 1, H or 1, N or 1, M)`, boolean (True = may attend) or additive.

    Raises:
        ValueError: the rows of real tokens differ, or an additive mask holds values other than 0 and "never".
    """
    if mask is None:
        return None
    if mask.dim() == 3:
        mask = mask[:, None]
    if mask.dim() not in (2, 4) or mask.shape[-1] != keys or mask.shape[0] not in (1, batch):
        raise ValueError(
            f"attention mask: expected (B, {keys}) or (B, heads, {queries}, {keys}) with B = {batch}, "
            f"got {tuple(mask.shape)}."
        )
    looks = not torch.compiler.is_compiling()
    allowed = _allowed(mask, looks)
    if allowed.dim() == 2:
        return allowed.expand(batch, keys)
    if allowed.shape[2] == 1 or allowed.stride(2) == 0:
        rows = allowed[:, :, 0]
    else:
        rows = allowed.any(2)
        if looks:
            real = rows[:, :, :, None] if queries == keys else torch.ones_like(allowed[..., :1])
            if bool(((allowed != rows[:, :, None]) & real).any()):
                raise ValueError(_NOT_PADDING.format(why="tokens of one sequence see different sets of keys"))
    if looks and rows.shape[1] > 1 and bool((rows != rows[:, :1]).any()):
        raise ValueError(_NOT_PADDING.format(why="heads see different sets of keys"))
    return rows[:, 0].expand(batch, keys)


def _allowed(mask: Tensor, looks: bool) -> Tensor:
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        return mask != 0
    if mask.dim() == 2 and not looks:
        return torch.where((mask > 0).any(), mask != 0, mask == 0)
    if mask.dim() == 2 and bool((mask > 0).any()):
        return mask != 0  # a 0/1 mask of real tokens in floating point
    if looks and bool(((mask != 0) & (mask > -1e4)).any()):
        raise ValueError(_NOT_PADDING.format(why="it adds finite numbers to the scores"))
    return mask == 0
