"""Softmax whose far keys are read through the centres of groups found in the sample, and whose near keys are exact."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..padding import zero_padding
from .groups import find_groups, one_hot
from .window import Reach, _layout, _neighbours, _picked, _places

QUERIES = 64
"""Queries whose keys by content are gathered together: they are as many rows of keys as each of them reads."""


class Grouping(NamedTuple):
    """The grouping of keys, and the keys read exactly.

    Args:
        rank: how many groups. steps: of assignment and mean.
        prefix: the first so many keys are special tokens: always exact, in no group.
        heaviest: the keys of the heaviest groups of a query, so many, are exact too,
        most: as far as they are among the first so many keys of their group.
    """

    rank: int
    steps: int = 3
    prefix: int = 0
    heaviest: int = 0
    most: int = 0


class Found(NamedTuple):
    """`out (B, H, N, Dv)`; `share (B, H, N)`, the part of a row that was read exactly, without a gradient; and the
    `groups (B, H, M)` of the keys after the prefix, `rank` for padding."""

    out: Tensor
    share: Tensor
    groups: Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor | None,
    shift: Tensor | None,
    offset: Tensor | None,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    reach: Reach | None,
    grouping: Grouping,
    groups: Tensor | None,
) -> Found:
    dtype = torch.promote_types(q.dtype, torch.float32)
    rank, prefix = grouping.rank, grouping.prefix
    real = None if key_mask is None else key_mask[:, prefix:]
    given = q
    q, k, v = (
        zero_padding(q, query_mask).to(dtype),
        zero_padding(k, key_mask).to(dtype),
        zero_padding(v, key_mask).to(dtype),
    )
    if groups is None:
        groups = find_groups(q, k[:, :, prefix:], query_mask, real, rank, grouping.steps)
    q = q * q.shape[-1] ** -0.5
    member = one_hot(groups, rank, dtype)
    size = member.sum(2)
    centres = member.mT @ k[:, :, prefix:] / size.clamp_min(1)[..., None]
    far = q @ _corrected(centres, gain, shift).mT
    if offset is not None:
        far = far + offset.to(dtype)[:, None, None]

    exact: list[_Keys] = [_Prefix(q, k, v, key_mask, prefix)] if prefix else []
    if reach is not None:
        exact.append(_Window(q, k[:, :, prefix:], v[:, :, prefix:], groups, rank, reach))
    if grouping.heaviest:
        exact.append(_Content(q, k[:, :, prefix:], v[:, :, prefix:], groups, far.detach(), size, reach, grouping))

    # a group counts for the keys that are not read exactly; emptied ones do not even set the scale
    left = size[:, :, None].expand_as(far)
    for keys in exact:
        left = keys.taken_from(left)
    lowest = torch.finfo(dtype).min
    far = far.masked_fill(left < 0.5, lowest)
    top = torch.stack([far.amax(-1), *(keys.scores.detach().amax(-1) for keys in exact)]).amax(0).detach()[..., None]
    weight = _weights(far, top, lowest)
    beside = (weight * left).sum(-1)
    read = weight @ (member.mT @ v[:, :, prefix:])
    within = torch.zeros_like(beside)
    for keys in exact:
        own = _weights(keys.scores, top, lowest)
        within = within + own.sum(-1)
        read = read + keys.read(own, weight)
    total = (within + beside)[..., None]
    out = read / torch.where(total > 0, total, 1.0)
    share = (within / torch.where(total[..., 0] > 0, total[..., 0], 1.0)).detach()
    if query_mask is not None:
        share = share.masked_fill(~query_mask[:, None], 0.0)
    return Found(zero_padding(out.to(given.dtype), query_mask), share, groups)


def _corrected(centres: Tensor, gain: Tensor | None, shift: Tensor | None) -> Tensor:
    if gain is not None:
        centres = centres * gain.to(centres.dtype)[:, None, None]
    return centres if shift is None else centres + shift.to(centres.dtype)[:, None]


def _weights(scores: Tensor, top: Tensor, lowest: float) -> Tensor:
    return (scores - top).exp().masked_fill(scores == lowest, 0.0)


class _Keys:
    """Keys that queries read exactly. `scores (B, H, N, keys)`, the lowest number where there is no key."""

    scores: Tensor

    def taken_from(self, left: Tensor) -> Tensor:
        """`left (B, H, N, rank)` keys of each group, less those."""
        return left

    def read(self, own: Tensor, far: Tensor) -> Tensor:
        """`Σ_j (own_j - far_t(j)) v_j`, of their own weights and those of their groups, which count them too."""
        raise NotImplementedError


class _Prefix(_Keys):
    def __init__(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, prefix: int) -> None:
        self.v = v[:, :, :prefix]
        self.scores = q @ k[:, :, :prefix].mT
        if key_mask is not None:
            self.scores = self.scores.masked_fill(~key_mask[:, None, None, :prefix], torch.finfo(q.dtype).min)

    def read(self, own: Tensor, far: Tensor) -> Tensor:
        return own @ self.v


class _Window(_Keys):
    def __init__(self, q: Tensor, k: Tensor, v: Tensor, groups: Tensor, rank: int, reach: Reach) -> None:
        length = q.shape[2]
        self.length, self.rank = length, rank
        self.rows, self.columns, self.around = _layout(length, reach)
        index, inside = _places(self.columns, self.around, reach, q.device)
        scores = self._in_rows(q) @ self._near(k).mT
        groups = _picked(self._near(groups[..., None] - rank)[..., 0][..., None, :].expand_as(scores), index) + rank
        groups = groups.masked_fill(~inside, rank)  # what is beyond the ends is in no group, as padding is
        scores = _picked(scores, index).masked_fill(groups == rank, torch.finfo(q.dtype).min)
        self.index, self.v = index, v
        self.scores, self.groups = (x.flatten(2, 3)[:, :, :length] for x in (scores, groups))

    def taken_from(self, left: Tensor) -> Tensor:
        return _taken(left, self.groups)

    def read(self, own: Tensor, far: Tensor) -> Tensor:
        weights = self._in_rows(own - _of_groups(far, self.groups))
        near = self._near(self.v)
        band = weights.new_zeros(*weights.shape[:-1], near.shape[3])
        band = band.scatter_add(-1, self.index.expand_as(weights), weights)
        return (band @ near).flatten(2, 3)[:, :, : self.length]

    def _in_rows(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, self.rows * self.columns - self.length)).unflatten(2, (self.rows, self.columns))

    def _near(self, x: Tensor) -> Tensor:
        return _neighbours(x, self.rows, self.columns, self.around)


class _Content(_Keys):
    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        groups: Tensor,
        far: Tensor,
        size: Tensor,
        reach: Reach | None,
        grouping: Grouping,
    ) -> None:
        self.v = v
        rank = grouping.rank
        listed = first_keys(groups, rank, grouping.most)
        chosen = heaviest(far + size.log()[:, :, None], min(grouping.heaviest, rank))
        self.keys = _rows(F.pad(listed, (0, 0, 0, 1), value=-1), chosen).flatten(
            3
        )  # (B, H, N, heaviest · most), -1 where there is none
        if reach is not None:
            query = torch.arange(q.shape[2], device=q.device)[:, None]
            self.keys = self.keys.masked_fill(_sees(query, self.keys, reach), -1)
        none = self.keys < 0
        self.keys = self.keys.clamp_min(0)
        self.groups = groups.gather(2, self.keys.flatten(2)).view_as(self.keys).masked_fill(none, rank)
        parts = zip(q.split(QUERIES, 2), self.keys.split(QUERIES, 2), strict=True)
        scores = torch.cat([(_rows(k, keys) @ part[..., None])[..., 0] for part, keys in parts], 2)
        self.scores = scores.masked_fill(none, torch.finfo(q.dtype).min)

    def taken_from(self, left: Tensor) -> Tensor:
        return _taken(left, self.groups)

    def read(self, own: Tensor, far: Tensor) -> Tensor:
        weights = own - _of_groups(far, self.groups)
        parts = zip(weights.split(QUERIES, 2), self.keys.split(QUERIES, 2), strict=True)
        return torch.cat([(part[..., None, :] @ _rows(self.v, keys))[..., 0, :] for part, keys in parts], 2)


def first_keys(groups: Tensor, rank: int, most: int) -> Tensor:
    """The first keys of each group in the order of the sequence `(B, H, rank, most)`, -1 where there are no more."""
    batch, heads, length = groups.shape
    member = F.one_hot(groups, rank + 1)
    place = (member.cumsum(2) * member).sum(-1) - 1
    into = torch.where((place < most) & (groups < rank), groups * most + place, rank * most)
    listed = groups.new_full((batch, heads, rank * most + 1), -1)
    keys = torch.arange(length, device=groups.device).expand(batch, heads, -1)
    return listed.scatter(2, into, keys)[..., :-1].unflatten(2, (rank, most))


def heaviest(weights: Tensor, count: int) -> Tensor:
    """The groups of the largest log-weights `(…, count)`, the number of groups where there are no more."""
    chosen = []
    for _ in range(count):
        best, index = weights.max(-1, keepdim=True)
        chosen.append(index.masked_fill(best == -math.inf, weights.shape[-1]))
        weights = weights.scatter(-1, index, -math.inf)
    return torch.cat(chosen, -1)


def _sees(query: Tensor, key: Tensor, reach: Reach) -> Tensor:
    """True where a key is in the window of a query, by their places."""
    if reach.grid is None:
        return (query - key).abs() <= reach.columns_around
    columns = reach.grid[1]
    rows = (query // columns - key // columns).abs() <= reach.rows_around
    return rows & ((query % columns - key % columns).abs() <= reach.columns_around)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows `(B, H, *index, D)` of `x (B, H, tokens, D)`."""
    flat = index.flatten(2)[..., None].expand(-1, -1, -1, x.shape[3])
    return x.gather(2, flat).view(*index.shape, x.shape[3])


def _of_groups(far: Tensor, groups: Tensor) -> Tensor:
    """The weights of the groups of keys; zero without one."""
    return F.pad(far, (0, 1)).gather(-1, groups)


def _taken(left: Tensor, groups: Tensor) -> Tensor:
    count = torch.zeros_like(F.pad(left, (0, 1))).scatter_add(-1, groups, torch.ones_like(groups, dtype=left.dtype))
    return left - count[..., :-1]
