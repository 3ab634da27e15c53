"""Padded content, replaced before it can meet real content."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.padding import zero_padding

__all__ = ["zero_padding", "zero_padding_to_learn"]


def zero_padding_to_learn(x: Tensor, mask: Tensor | None) -> Tensor:
    """`x (B, N, C)` with padded tokens set to zero where gradients are recorded.

    Values need no cleaning before a linear map: what a padded token becomes is as padded as the token. The gradient of
    the map's weight sums over all tokens, though, and 0 · NaN is NaN.
    """
    return x if mask is None or not torch.is_grad_enabled() else x.masked_fill(~mask[..., None], 0.0)
