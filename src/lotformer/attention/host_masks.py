"""From the attention masks of other libraries to a mask of keys, or a refusal."""

from __future__ import annotations

import torch
from torch import Tensor

_NOT_PADDING = (
    "the attention mask is not a pure padding mask: {why}. Here every real token sees every real token; causal, "
    "windowed and block masks and additive position biases cannot be honoured. Keep softmax in such layers: `convert` "
    "leaves out what `layers=` does not name."
)

_BIAS = "it adds finite numbers to the scores"


def key_mask_from(mask: Tensor | None, batch: int, queries: int, keys: int) -> Tensor | None:
    """Boolean key mask `(B, M)`, True = a real token, from whatever a host model passes around.

    Args:
        mask: None; 2-D `(B, M)` with true or non-zero for real tokens (or additive: 0 and a large negative number);
            4-D `(B or 1, H or 1, N or 1, M)`, boolean (True = may attend) or additive.

    Raises:
        ValueError: the rows of real tokens differ, or an additive mask holds values other than 0 and "never". What
            depends on values cannot raise inside compiled code: there an assertion with the same message is part of
            the graph and fails when it runs, as a RuntimeError.
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
    allowed = _allowed(mask)
    if allowed.dim() == 2:
        return allowed.expand(batch, keys)
    if allowed.shape[2] == 1 or allowed.stride(2) == 0:
        rows = allowed[:, :, 0]
    else:
        rows = allowed.any(2)
        real = rows[:, :, :, None] if queries == keys else torch.ones_like(allowed[..., :1])
        different = (allowed != rows[:, :, None]) & real
        _refuse_if(different.any(), "tokens of one sequence see different sets of keys")
    if rows.shape[1] > 1:
        _refuse_if((rows != rows[:, :1]).any(), "heads see different sets of keys")
    return rows[:, 0].expand(batch, keys)


def key_mask_from_sdpa(mask: Tensor, batch: int, heads: int, length: int) -> Tensor:
    """`key_mask_from` for the `attn_mask` of `scaled_dot_product_attention`, which timm's layers take.

    Args:
        mask: anything that broadcasts to `(B, H, N, N)`, boolean (True = may attend) or additive. A 2-D mask is
            `(N, N)` here, never `(B, N)`.
    """
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"`attn_mask`: expected a boolean or an additive mask, got {mask.dtype}: use attn_mask.bool()."
        )
    shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    full = (batch, heads, length, length)
    if (
        len(shape) > 4
        or shape[3] != length
        or any(size not in (1, whole) for size, whole in zip(shape, full, strict=True))
    ):
        raise ValueError(
            f"`attn_mask`: expected a shape that broadcasts to (B, heads, N, N) = {full}, got {tuple(mask.shape)}. "
            f"Pass a ({batch}, {length}) mask of real tokens as `mask`."
        )
    allowed = key_mask_from(mask.reshape(shape), batch, length, length)
    assert allowed is not None
    return allowed


def additive_allows(mask: Tensor) -> Tensor:
    """True where an additive mask lets tokens through; refused unless it holds 0 and "never" only."""
    _refuse_if(_finite_bias(mask).any(), _BIAS)
    return mask == 0


def _allowed(mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        return mask != 0
    if mask.dim() == 4:
        return additive_allows(mask)
    marks_real = (mask > 0).any()  # a 0/1 mask of real tokens in floating point
    _refuse_if(_finite_bias(mask).any() & ~marks_real, _BIAS)
    return torch.where(marks_real, mask != 0, mask == 0)


def _finite_bias(mask: Tensor) -> Tensor:
    return (mask != 0) & (mask > -1e4)


def _refuse_if(condition: Tensor, why: str) -> None:
    message = _NOT_PADDING.format(why=why)
    if torch.compiler.is_compiling():
        torch._assert_async(~condition, message)  # a branch on values would break the graph
    elif bool(condition):
        raise ValueError(message)
