"""Transport problems between tokens and pivots that are hard to solve: generated, seeded, thousands of them.

Every problem is given by its scores, rounded to fp32, and is handed to the operator with the identity as pivots and
`scale = eps = 1`. So all precisions and backends solve the very same problem, and a difference between them is the
solver's: rounding in `q zᵀ` plays no part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Scores(NamedTuple):
    """Scores of some problems in fp64 before scaling, `(problems, N, R)` and `(problems, M, R)`."""

    query: Tensor
    key: Tensor


class Batch(NamedTuple):
    """Problems of one shape as one call: every problem is a head."""

    name: str
    inputs: dict[str, Tensor]  # q, k, pivots, log_masses, query_masses, key_masses: fp64, exact in fp32

    @property
    def problems(self) -> int:
        return self.inputs["q"].shape[1]

    def first(self, count: int) -> Batch:
        """The first few of the problems."""
        per_batch = ("q", "k", "query_masses", "key_masses")
        few = {name: x[:, :count] if name in per_batch else x[:count] for name, x in self.inputs.items()}
        return Batch(self.name, few)

    def arguments(self, dtype: torch.dtype) -> dict[str, Any]:
        return {name: x.to(dtype) for name, x in self.inputs.items()} | {"eps": 1.0, "scale": 1.0, "solver": "newton"}


Normal = Callable[..., Tensor]


def _gaussian(normal: Normal, count: int, n: int, rank: int) -> Scores:
    z = normal(count, rank, 16)
    return Scores(normal(count, n, 16) @ z.mT, normal(count, n, 16) @ z.mT)


def _clustered(normal: Normal, count: int, n: int, rank: int) -> Scores:
    """Tokens in a few tight clusters: whole groups change sides at once."""
    z, centres = normal(count, rank, 16), 2 * normal(count, 5, 16)
    member = torch.arange(n) % 5
    tokens = (centres[:, member] + 0.01 * normal(count, n, 16) for _ in range(2))
    return Scores(*(x @ z.mT for x in tokens))


def _duplicated(normal: Normal, count: int, n: int, rank: int) -> Scores:
    """Every pivot twice: only the sum of two potentials' shares matters."""
    z = normal(count, (rank + 1) // 2, 16).repeat(1, 2, 1)[:, :rank]
    return Scores(normal(count, n, 16) @ z.mT, normal(count, n, 16) @ z.mT)


def _near_singular(normal: Normal, count: int, n: int, rank: int) -> Scores:
    """Pivots that nearly coincide and scores of rank two."""
    z = normal(count, 1, 2) + 0.02 * normal(count, rank, 2)
    return Scores(normal(count, n, 2) @ z.mT, normal(count, n, 2) @ z.mT)


def _heavy_tailed(normal: Normal, count: int, n: int, rank: int) -> Scores:
    """A few tokens and a few pivots far away from all others."""
    z = normal(count, rank, 16) * (0.8 * normal(count, rank, 1)).exp()
    return Scores(*((normal(count, n, 16) * normal(count, n, 1).exp()) @ z.mT for _ in range(2)))


def _matched(normal: Normal, count: int, n: int, rank: int) -> Scores:
    """Pivots that lie on tokens: the plans are nearly permutations and fall apart into unconnected pieces."""
    z = normal(count, rank, 16)
    z = z / z.norm(dim=-1, keepdim=True)
    which = torch.arange(n) % rank
    return Scores(*(4 * (z[:, which] + 0.02 * normal(count, n, 16)) @ z.mT for _ in range(2)))


def _unrelated(normal: Normal, count: int, n: int, rank: int) -> Scores:
    """Scores without any geometry."""
    return Scores(normal(count, n, rank), normal(count, n, rank))


FAMILIES = {
    function.__name__.strip("_"): function
    for function in (_gaussian, _clustered, _duplicated, _near_singular, _heavy_tailed, _matched, _unrelated)
}
SHAPES = ((64, 32), (7, 32), (33, 20), (96, 7), (120, 40))
LARGEST_SCORES = (258.0, 1000.0, 3000.0, 1e4)
"""Size of the largest score; a Gaussian token of unit size meets 1000 at about ε = 0.004."""


PER_BATCH = 22


def hard_problems(families: Iterable[str] = FAMILIES) -> Iterator[Batch]:
    """Batches of every shape and size of the scores for each family; every second problem has skewed masses."""
    for family in families:
        for largest in LARGEST_SCORES:
            for n, rank in SHAPES:
                yield make_batch(family, n, rank, largest)


def long_problems() -> Iterator[Batch]:
    """Few, with so many tokens that the kernel walks the path on samples of them."""
    for family in ("gaussian", "heavy_tailed"):
        for largest in (258.0, 3000.0):
            yield make_batch(family, 5000, 33, largest, count=2)


def make_batch(family: str, n: int, rank: int, largest: float, count: int = PER_BATCH, skew: float = 2.0) -> Batch:
    generator = torch.Generator().manual_seed(list(FAMILIES).index(family) + 10 * n)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    scores = FAMILIES[family](normal, count, n, rank)
    query, key = (x * (largest / x.abs().amax((-2, -1), keepdim=True)) for x in scores)
    uneven = torch.where(torch.arange(count) % 2 == 0, 0.0, skew)[:, None]
    inputs = {
        "q": query[None],
        "k": key[None],
        "pivots": torch.eye(rank, dtype=torch.float64).expand(count, rank, rank),
        "log_masses": (uneven * normal(count, rank)).log_softmax(-1),
        "query_masses": (uneven * normal(count, n)).softmax(-1)[None],
        "key_masses": (uneven * normal(count, n)).softmax(-1)[None],
    }
    rounded = {name: x.float().double() for name, x in inputs.items()}
    return Batch(f"{family} N={n} R={rank} scores to {largest:g}", rounded)
