"""The table of operators and backends: which implementations there are, which can run a given problem, and why not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import cpu, plain, reference, triton


@dataclass(frozen=True)
class Backend:
    """A cell of the table: one implementation of one operator.

    `why_unavailable()` explains why it cannot run on this machine at all, `why_unsupported(*problem)` why it cannot run
    this problem, `why_distrusted(*problem)` why it is not picked unless it is named; all return None when it can. A
    problem is the arguments of the operator.
    """

    name: str
    run: Callable[..., Any]
    why_unavailable: Callable[[], str | None]
    why_unsupported: Callable[..., str | None]
    why_distrusted: Callable[..., str | None] | None = None


@dataclass
class Operator:
    """A row of the table: its implementations in order of preference; the reference comes last and runs everything."""

    name: str
    backends: tuple[Backend, ...]

    @property
    def reference(self) -> Backend:
        """The definition."""
        return self.backends[-1]

    def choose(self, name: str | None, *problem: Any) -> Backend:
        """The best backend for the problem, or the named one, or an error that says why it cannot be used.

        A name that only other operators have leaves the choice free.
        """
        forced = None if name is None else self._named(name)
        if forced is not None:
            reason = forced.why_unavailable() or forced.why_unsupported(*problem)
            if reason:
                raise ValueError(
                    f"backend {name!r} cannot be used here for the {self.name}: {reason} "
                    "Use `backend=None` to let it be chosen."
                )
            return forced
        if torch.compiler.is_exporting():
            return self.reference  # an exported program should run where this package's kernels are not
        for backend in self.backends:
            if backend.why_unsupported(*problem) is None:
                reason = backend.why_unavailable()
                if reason is not None:
                    _say_once(backend.name, reason)
                elif backend.why_distrusted is None or backend.why_distrusted(*problem) is None:
                    return backend
        return self.reference

    def _named(self, name: str) -> Backend | None:
        for backend in self.backends:
            if backend.name == name:
                return backend
        require_name(name)
        return None


def _reference(definition: Callable[..., Any]) -> Backend:
    return Backend("reference", definition, lambda: None, lambda *problem: None)


def _cpu(kernel: Any) -> Backend:
    return Backend("cpu", kernel.run, cpu.why_unavailable, kernel.why_unsupported)


TRANSPORT = Operator(
    "transport",
    (
        _cpu(cpu.op),
        Backend("triton", triton.run, triton.why_unavailable, triton.why_unsupported, triton.why_distrusted),
        _reference(reference.run),
    ),
)
WINDOW = Operator("window", (_cpu(cpu.near), _reference(plain.read_window)))
POOLING = Operator("pooling", (_cpu(cpu.pooling), _reference(plain.pool)))
MASSES = Operator("key masses", (_cpu(cpu.masses), _reference(plain.key_masses)))
JOINING = Operator("joined rows", (_cpu(cpu.joining), _reference(plain.join)))
FOUND = Operator("found groups", (_cpu(cpu.found), _reference(plain.read_groups)))

OPERATORS = (TRANSPORT, WINDOW, POOLING, MASSES, JOINING, FOUND)


def names() -> list[str]:
    """Names of all backends, best first; the reference is the last."""
    found = dict.fromkeys(backend.name for operator in OPERATORS for backend in operator.backends[:-1])
    return [*found, OPERATORS[0].reference.name]


def require_name(name: Any) -> None:
    """Refuse what is no name of a backend."""
    if name not in names():
        raise ValueError(f"`backend`: expected None or one of {', '.join(map(repr, names()))}, got {name!r}.")


_missed: set[str] = set()


def _say_once(name: str, reason: str) -> None:
    """The first time a suitable backend does not run on this machine, say so."""
    if name not in _missed and not torch.compiler.is_compiling():
        _missed.add(name)
        warnings.warn(f"LOT attention runs without its {name!r} backend: {reason}", stacklevel=6)
