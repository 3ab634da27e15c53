"""Padded content, replaced before it can meet real content."""

from __future__ import annotations

from torch import Tensor


def zero_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """`x (B, H, N, D)` with padded tokens set to zero, so that NaN or inf there cannot spread.

    On the way in it cleans padded content; on the way out it silences the rows of padded queries.
    """
    return x if mask is None else x.masked_fill(~mask[:, None, :, None], 0.0)
