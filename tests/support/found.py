"""Problems of the operator of found groups, and what it computes as one matrix, entry by entry."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from lotformer.ops import Found, Grouping, Reach, found_attention

CORRECTIONS = ("gain", "shift", "offset")


@dataclass(frozen=True)
class Problem:
    rank: int = 5
    steps: int = 3
    prefix: int = 1
    heaviest: int = 0
    most: int = 0
    grid: tuple[int, int] = (4, 7)
    window: str | None = "2d"
    reach: tuple[int, int] = (1, 2)
    more_keys: int = 0  # without a window
    batch: int = 2
    heads: int = 2
    dim: int = 16
    value_dim: int = 16
    masked: bool = False
    by_head: bool = False  # in memory
    corrected: bool = True
    seed: int = 0

    @property
    def length(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def grouping(self) -> Grouping:
        return Grouping(self.rank, self.steps, self.prefix, self.heaviest, self.most)

    def where(self) -> Reach | None:
        if self.window is None:
            return None
        return Reach(self.grid, *self.reach) if self.window == "2d" else Reach(None, 0, self.reach[1])


problems = st.builds(
    Problem,
    rank=st.integers(1, 40),
    steps=st.integers(1, 4),
    prefix=st.sampled_from([0, 0, 1, 3]),
    grid=st.tuples(st.integers(1, 9), st.integers(1, 18)),
    window=st.sampled_from([None, "1d", "2d"]),
    reach=st.tuples(st.integers(0, 4), st.sampled_from([0, 1, 2, 5, 16, 64])),
    more_keys=st.sampled_from([0, 1, 30]),
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    dim=st.integers(1, 70),
    value_dim=st.integers(1, 70) | st.sampled_from([16, 64]),
    masked=st.booleans(),
    by_head=st.booleans(),
    corrected=st.booleans(),
    seed=st.integers(0, 99),
)


@dataclass
class Built:
    problem: Problem
    x: dict[str, Tensor]  # what has gradients, in fp64
    masks: dict[str, Tensor] = field(default_factory=dict)


def build(p: Problem) -> Built:
    generator = torch.Generator().manual_seed(p.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).double()

    def tokens(count: int, width: int) -> Tensor:
        if p.by_head:
            return normal(p.batch, p.heads, count, width)
        return normal(p.batch, count, p.heads, width).transpose(1, 2)

    keys = p.prefix + p.length + (p.more_keys if p.window is None else 0)
    x = {"q": tokens(p.length, p.dim), "k": tokens(keys, p.dim), "v": tokens(keys, p.value_dim)}
    if p.corrected:
        x |= {"gain": 1 + 0.3 * normal(p.heads), "shift": 0.5 * normal(p.heads, p.dim), "offset": normal(p.heads)}
    built = Built(p, x)
    if p.masked:
        built.masks["query_mask"] = torch.rand(p.batch, p.length, generator=generator) < 0.7
        built.masks["key_mask"] = torch.rand(p.batch, keys, generator=generator) < 0.6
    return built


def attend(b: Built, x: dict[str, Tensor] | None = None, **options: Any) -> Found:
    given = {**b.x, **(x or {})}
    tokens = [given.pop(name) for name in ("q", "k", "v")]
    return found_attention(*tokens, b.problem.grouping, b.problem.where(), **given, **{**b.masks, **options})


def with_gradients(b: Built, dtype: torch.dtype, **options: Any) -> tuple[dict[str, Tensor], Tensor]:
    """What is read, the part that is exact, and the gradients of everything; and the groups."""
    narrow = ("q", "k", "v")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = {n: t.to(dtype if n in narrow else wide).detach().requires_grad_() for n, t in b.x.items()}
    found = attend(b, leaves, **options)
    cotangent = torch.arange(found.out.numel()).sin().bfloat16().to(found.out.dtype).view(found.out.shape)
    grads = torch.autograd.grad(found.out, list(leaves.values()), cotangent)
    named = {"out": found.out.detach(), "share": found.share}
    named |= {f"grad of {name}": g for name, g in zip(leaves, grads, strict=True)}
    return named, found.groups


def exactly_read(b: Built, groups: Tensor, far: Tensor) -> Tensor:
    """Which keys each query reads by softmax `(B, H, N, M)`."""
    p = b.problem
    batch, heads, n, _ = far.shape
    exact = torch.zeros(batch, heads, n, p.prefix + groups.shape[2], dtype=torch.bool)
    exact[..., : p.prefix] = True
    where = p.where()
    i = torch.arange(n)
    if where is not None:
        columns = n if where.grid is None else where.grid[1]
        down = (i[:, None] // columns - i // columns).abs() <= (0 if where.grid is None else where.rows_around)
        exact[..., p.prefix :] |= down & ((i[:, None] % columns - i % columns).abs() <= where.columns_around)
    if p.heaviest:
        size = torch.stack([(groups == t).sum(-1) for t in range(p.rank)], -1)
        for t in range(p.rank):
            mine = (groups == t) & ((groups == t).cumsum(-1) <= p.most)
            weight = far + size.log()[:, :, None]
            above = (weight > weight[..., t : t + 1]).sum(-1) + (weight[..., :t] == weight[..., t : t + 1]).sum(-1)
            exact[..., p.prefix :] |= (above < p.heaviest)[..., None] & mine[:, :, None]
    return exact


def as_matrix(b: Built, x: dict[str, Tensor], groups: Tensor) -> tuple[Tensor, Tensor]:
    """The matrix that the values are multiplied by `(B, H, N, M)`, and which of its entries are softmax's own."""
    p = b.problem
    q, k = x["q"], x["k"]
    real = b.masks.get("key_mask", torch.ones(p.batch, k.shape[2], dtype=torch.bool))
    k = k.masked_fill(~real[:, None, :, None], 0.0)
    member = torch.stack([groups == t for t in range(p.rank)], 2).to(k.dtype)
    centres = member @ k[:, :, p.prefix :] / member.sum(-1, keepdim=True).clamp_min(1)
    if p.corrected:
        centres = centres * x["gain"][:, None, None] + x["shift"][:, None]
    far = q @ centres.mT / p.dim**0.5 + (x["offset"][:, None, None] if p.corrected else 0.0)
    scores = q @ k.mT / p.dim**0.5
    exact = exactly_read(b, groups, far.detach())
    of_groups = far.gather(-1, groups.clamp_max(p.rank - 1)[:, :, None].expand(-1, -1, q.shape[2], -1))
    through = torch.cat([scores[..., : p.prefix], of_groups], -1)
    weights = torch.where(exact, scores, through).masked_fill(~real[:, None, None], -1e300).softmax(-1)
    weights = weights.masked_fill(~real[:, None, None], 0.0)
    if "query_mask" in b.masks:
        weights = weights.masked_fill(~b.masks["query_mask"][:, None, :, None], 0.0)
    return weights, exact
