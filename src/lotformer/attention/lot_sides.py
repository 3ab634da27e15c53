"""The two sides of an attention as LOT reads them, and the sides that are queries and keys."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from ..nn.softmax import softmax_of_real
from ..ops import Transport
from ..ops.precision import no_autocast
from .inputs import Inputs
from .lot_parts import LOTParts
from .masking import zero_padding


class Sides(ABC):
    """Queries and keys as tokens or as scores: LOT is one computation on either form.

    Methods take the values to read, which are those of `v` after dropout.

    Attributes:
        v: values of all tokens `(B, H, M, Dv)`. key_mask, query_mask, grid: as in `Attention`, of all tokens.
        scale: factor of the scores that `transport` leaves to the operator.
    """

    v: Tensor
    key_mask: Tensor | None
    query_mask: Tensor | None
    grid: tuple[int, int] | None
    scale: float | None

    @abstractmethod
    def transport(self, v: Tensor | None, share: Tensor | None) -> Transport:
        """The problem of the tokens after the prefix, of whose rows near keys take the share `(B, H, N)`.

        `v=None` is for callers that want the plans alone: some values are put in.
        """

    @abstractmethod
    def rows(self, v: Tensor) -> Tensor:
        """Rows of the prefix, `(B, H, P, Dv)`."""

    def near(self, v: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """The output of the window for the tokens after the prefix, and its share of their rows; None without one."""
        return None, None


class TokenSides(Sides):
    """Sides that are queries and keys."""

    def __init__(self, lot: LOTParts, inputs: Inputs) -> None:
        _, _, self.v, self.key_mask, self.query_mask, self.grid = inputs
        self.scale = lot.config.scale
        self.lot, self.whole, self.body = lot, inputs, inputs.after(lot.prefix_tokens)

    def transport(self, v: Tensor | None, share: Tensor | None) -> Transport:
        lot = self.lot
        q, k, _, key_mask, query_mask, _ = self.body
        points, log_masses = lot.pivots(k)
        if lot.pooling is not None:
            points = points + lot.pooling(k, key_mask)
        query_masses = None if share is None else _left_over(share, query_mask)
        key_masses = lot.key_masses(q, k, key_mask, query_mask, backend=lot.config.backend)
        if v is None:
            v = k
        elif lot.prefix_tokens:
            v = v[:, :, lot.prefix_tokens :]
        return Transport(q, k, v, points, log_masses, query_mask, key_mask, query_masses, key_masses)

    def rows(self, v: Tensor) -> Tensor:
        lot = self.lot
        assert lot.prefix is not None
        head = clean_prefix(self.whole.q[:, :, : lot.prefix_tokens], self.query_mask)
        return lot.prefix(head, self.whole.k, v, self.key_mask, backend=lot.config.backend)

    def near(self, v: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if self.lot.near is None or self.body.q.shape[2] == 0:
            return None, None
        q, _, _, _, query_mask, grid = self.body
        near: tuple[Tensor | None, Tensor] = self.lot.near(
            q, self.whole.k, v, self.key_mask, grid, query_mask, backend=self.lot.config.backend
        )
        return near

    def softmax(self, v: Tensor, *, prefix: bool = False) -> Tensor:
        """Softmax attention of the tokens after the prefix, or of all, over real keys, in the queries' precision."""
        reading, k = self.whole if prefix else self.body, self.whole.k
        q = reading.q
        with no_autocast(q.device.type):
            return zero_padding(softmax_of_real(q, k.to(q.dtype), v.to(q.dtype), self.key_mask), reading.query_mask)


def clean_prefix(x: Tensor, mask: Tensor | None) -> Tensor:
    """The tokens of a prefix `(B, H, P, D)` with zeros for padding; the mask is that of all tokens."""
    return x if mask is None else zero_padding(x, mask[:, : x.shape[2]])


def _left_over(share: Tensor, query_mask: Tensor | None) -> Tensor:
    """Masses of the queries of which near keys take this share: they have that much less to send."""
    left = (1 - share).clamp_min(1e-6)
    if query_mask is not None:
        left = left.masked_fill(~query_mask[:, None], 0.0)
    return left / left.sum(-1, keepdim=True).clamp_min(1e-30)
