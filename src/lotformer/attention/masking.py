"""How mechanisms honour padding: padded content is replaced before it can meet real content."""

from __future__ import annotations

from torch import Tensor


def zero_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """`x (B, H, N, D)` with padded tokens set to zero, so that NaN or inf there cannot spread.

    On the way in it cleans padded content; on the way out it silences the rows of padded queries.
    """
    return x if mask is None else x.masked_fill(~mask[:, None, :, None], 0.0)


def require_equal_lengths(q: Tensor, k: Tensor, name: str, reason: str = "it is defined within one sequence") -> None:
    """Refuse cross-attention where the mechanism is only defined among one set of tokens."""
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"{name} needs as many keys as queries ({reason}), got {q.shape[2]} queries and {k.shape[2]} keys."
        )


def shared_mask(key_mask: Tensor | None, query_mask: Tensor | None) -> Tensor | None:
    """Tokens that are real on both sides, for self-attention in which a token cannot be only a query or only a key."""
    if key_mask is None or query_mask is None:
        return query_mask if key_mask is None else key_mask
    return key_mask & query_mask
