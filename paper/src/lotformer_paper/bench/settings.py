"""Settings that the benchmarks share."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lotformer import attention
from lotformer.ops.problem import Balance
from lotformer.settings import Settings, setting

from .agreement import check_backend

CORES = min(2, os.cpu_count() or 1)
SAMPLE = 517  # tokens on which a backend has to agree with the reference


@dataclass(frozen=True)
class BenchSettings(Settings):
    """Settings of every benchmark."""

    threads: int = setting(CORES, "Number of CPU threads.", at_least=1)
    backend: str | None = setting(None, "Backend of LOT; by default the best available one.")
    seed: int = setting(0, "Seed of the random tokens and parameters.")


@dataclass(frozen=True)
class LotSettings(BenchSettings):
    """Settings of benchmarks of LOT."""

    rank: int = setting(32, "Pivots per head.", at_least=1)
    iters: int = setting(5, "Sinkhorn sweeps of LOT.", at_least=1)
    eps: float = setting(1.0, "Entropic regularisation of LOT.")
    balance: Balance = setting("both", "Marginals that LOT imposes.")

    @property
    def lot_options(self) -> dict[str, Any]:
        """Options of LOT in this benchmark, without the rank."""
        return {"iters": self.iters, "eps": self.eps, "balance": self.balance}


def agreed_backend(
    settings: LotSettings, *, heads: int, head_dim: int, backward: bool, ranks: Iterable[int] | None = None
) -> str:
    """The backend that will be timed, after it has agreed with the reference at every rank.

    Raises:
        KernelDisagrees: it has not.
    """
    names = {
        check_backend(
            settings.backend, rank=rank, head_dim=head_dim, heads=heads, n=SAMPLE, eps=settings.eps,
            iters=settings.iters, backward=backward, balance=settings.balance,
        )
        for rank in (ranks or [settings.rank])
    }  # fmt: skip
    return "/".join(sorted(names))


def known(mechanisms: Iterable[str]) -> list[str]:
    """The mechanisms by their names in the registry, which refuses others."""
    return [attention.entry(name).name for name in mechanisms]


def doubling(first: int, last: int) -> list[int]:
    """first, 2·first, … up to last."""
    if first < 1 or last < first:
        raise ValueError(f"expected 1 <= min-n <= max-n, got {first} and {last}.")
    lengths = [first]
    while 2 * lengths[-1] <= last:
        lengths.append(2 * lengths[-1])
    return lengths
