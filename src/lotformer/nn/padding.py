"""Padded content, replaced before it can meet real content."""

from __future__ import annotations

import torch
from torch import Tensor


def zero_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """`x (B, H, N, D)` with padded tokens set to zero, so that NaN or inf there cannot spread.

    On the way in it cleans padded content; on the way out it silences the rows of padded queries.
    """
    return x if mask is None else x.masked_fill(~mask[:, None, :, None], 0.0)


def zero_padding_to_learn(x: Tensor, mask: Tensor | None) -> Tensor:
    """`x (B, N, C)` with padded tokens set to zero where gradients are recorded.

    Values need no cleaning before a linear map: what a padded token becomes is as padded as the token. The gradient of
    the map's weight sums over all tokens, though, and 0 · NaN is NaN.
    """
    return x if mask is None or not torch.is_grad_enabled() else x.masked_fill(~mask[..., None], 0.0)
