"""Sides that are scores with the pivots, read off the input of a layer: its queries and keys are not formed."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..nn.key_masses import masses_of, mean_of_real
from ..ops import Transport
from .inputs import Inputs
from .lot_parts import LOTParts
from .lot_sides import Sides, clean_prefix
from .masking import zero_padding
from .unformed import Linear, Projections, Reads, at_once, products_by_head


class ScoreSides(Sides):
    """Scores made of the input `x (B, N, C)` by the maps `reads`: one product for all tokens, where that pays.

    Args:
        values: `(B, H, N, D)`, or the map that makes them of the input; None if there are none.
    """

    scale = 1.0  # scores are whole

    def __init__(
        self,
        lot: LOTParts,
        reads: Reads,
        x: Tensor,
        values: Tensor | Linear | None,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        grid: tuple[int, int] | None,
    ) -> None:
        lot.require_prefix(x.shape[1])
        self.lot, self.reads, self.x = lot, reads, x
        self.key_mask, self.query_mask, self.grid = key_mask, query_mask, grid
        heads, rank, width = lot.num_heads, lot.pivots.rank, lot.head_dim
        maps = list(reads.scores)
        if reads.forms_keys:
            assert reads.keys is not None
            maps.append(reads.keys.map)
        if isinstance(values, Linear):
            maps.append(values)
        found = at_once(x, maps)
        count = len(reads.scores)
        scores = [side.transpose(1, 2) for y in found[:count] for side in y.unflatten(-1, (-1, heads, rank)).unbind(2)]
        formed = [y.unflatten(-1, (heads, width)).transpose(1, 2) for y in found[count:]]
        self.keys = None
        if reads.forms_keys:
            self.keys = formed[0]
            scores.append(products_by_head(self.keys, scaled_points(lot, self.keys)))
        self.query_scores, self.key_scores = scores
        self.v = formed[-1] if isinstance(values, Linear) else self.key_scores if values is None else values

    def transport(self, v: Tensor | None, share: Tensor | None) -> Transport:
        lot, v = self.lot, self.key_scores if v is None else v
        sides = Inputs(self.query_scores, self.key_scores, v, self.key_mask, self.query_mask)
        q, k, v, key_mask, query_mask, _ = sides.after(lot.prefix_tokens)
        key_masses = self._key_masses(key_mask, query_mask)
        return Transport(q, k, v, None, lot.pivots.log_masses(v), query_mask, key_mask, None, key_masses)

    def rows(self, v: Tensor) -> Tensor:
        lot, queries, keys = self.lot, self.reads.queries, self.reads.keys
        assert lot.prefix is not None
        assert queries is not None
        assert keys is not None
        head = clean_prefix(queries.formed(self.x[:, : lot.prefix_tokens]).transpose(1, 2), self.query_mask)
        if self.keys is not None:
            rows: Tensor = lot.prefix(head, self.keys, v, self.key_mask, backend=lot.config.backend)
            return rows
        seen = keys.seen_by(head * lot.prefix.temperature(lot.head_dim))
        scores = (seen @ self.x.mT).unflatten(1, head.shape[1:3])
        return lot.prefix.pool(scores, zero_padding(v, self.key_mask), self.key_mask)

    def _key_masses(self, key_mask: Tensor | None, query_mask: Tensor | None) -> Tensor | None:
        """Of the keys after the prefix."""
        masses, reads = self.lot.key_masses, self.reads
        if masses.kind == "uniform":
            return None
        rest = self.x[:, self.lot.prefix_tokens :]
        if reads.masses is not None:
            return masses_of(F.linear(rest, reads.masses).mT, key_mask)
        assert reads.queries is not None
        assert reads.keys is not None
        mean_query = None
        if masses.kind == "query-aware":
            mean_query = reads.queries.formed(mean_of_real(rest[:, None], query_mask)[:, 0])
        direction = masses.directions(self.x, mean_query)
        return masses_of(reads.keys.seen_by(direction[:, :, None]) @ rest.mT, key_mask)


def reads_of(lot: LOTParts, projections: Projections, like: Tensor) -> Reads:
    """The maps from the input of a layer with these projections to all that LOT reads of its queries and keys."""
    points = scaled_points(lot, like)
    queries, keys = projections.sides()
    formed = forms_keys(lot)
    scores = (queries.against(points),) if formed else (queries.against(points), keys.against(points))
    masses = None
    if lot.key_masses.kind == "linear":
        masses = keys.seen_by(lot.key_masses.directions(like, None)[:, :, None])[0]
    if lot.prefix is None and lot.key_masses.kind != "query-aware":
        return Reads(scores, masses, None, None, formed)
    return Reads(scores, masses, queries, keys, formed)


def is_cheaper(lot: LOTParts, width: int, tokens: int | None) -> bool:
    """True if reading takes fewer multiplications for `tokens` of `width` channels C; None: very many.

    Per head and token, q, k and their products with the pivots take 2·C·D + 2·D·R; from the input they take C·R a
    side, unless keys are formed. Making the weights of the scores takes as much as D tokens do.
    """
    d, r = lot.head_dim, lot.pivots.rank
    formed = forms_keys(lot)
    sides = 1 if formed else 2
    others = 0 if formed else lot.prefix_tokens + (lot.key_masses.kind != "uniform")
    saved = sides * (width * d + d * r - width * r) - others * (width - d)
    return saved > 0 if tokens is None else tokens * saved > sides * r * d * width


def forms_keys(lot: LOTParts) -> bool:
    """True if keys are formed after all: polarised scores are not linear in them."""
    return lot.prefix is not None and lot.prefix.polarize


def scaled_points(lot: LOTParts, like: Tensor) -> Tensor:
    """The points whose products with queries and keys are their scores."""
    points = lot.pivots.points(like)
    return points * (lot.head_dim**-0.5 if lot.config.scale is None else lot.config.scale)
