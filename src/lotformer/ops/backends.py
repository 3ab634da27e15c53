"""Which implementations of the operator there are, which can run a given problem, and why not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import cpu, reference, triton
from .folding import folding
from .problem import Problem


@dataclass(frozen=True)
class Backend:
    """An implementation of the operator.

    `why_unavailable()` explains why it cannot run on this machine at all, `why_unsupported(problem)` why it
    cannot run this problem; both return None when it can. `checks_pivot_masses` says that `run` itself refuses masses
    of the pivots that do not sum to one.
    """

    name: str
    run: Callable[[Problem], Tensor]
    why_unavailable: Callable[[], str | None]
    why_unsupported: Callable[[Problem], str | None]
    checks_pivot_masses: bool = False


BACKENDS: tuple[Backend, ...] = (
    Backend("cpu", cpu.run, cpu.why_unavailable, cpu.why_unsupported, checks_pivot_masses=True),
    Backend("triton", folding(triton.run), triton.why_unavailable, triton.why_unsupported),
    Backend("reference", reference.run, lambda: None, lambda problem: None),
)
"""In order of preference; the reference comes last and runs everything."""


def choose(problem: Problem, name: str | None) -> Backend:
    """The best backend for the problem, or the named one, or an error that says why it cannot be used."""
    if name is None and torch.compiler.is_exporting():
        return BACKENDS[-1]  # an exported program should run where this package's kernels are not
    if name is None:
        return next(b for b in BACKENDS if not b.why_unsupported(problem) and _is_available(b))
    backend = next((b for b in BACKENDS if b.name == name), None)
    if backend is None:
        known = ", ".join(repr(b.name) for b in BACKENDS)
        raise ValueError(f"`backend`: expected None or one of {known}, got {name!r}.")
    reason = backend.why_unavailable() or backend.why_unsupported(problem)
    if reason:
        raise ValueError(f"backend {name!r} cannot be used here: {reason} Use `backend=None` to let it be chosen.")
    return backend


_missed: set[str] = set()


def _is_available(backend: Backend) -> bool:
    """Whether it runs on this machine; the first time a suitable backend does not, say so."""
    reason = backend.why_unavailable()
    if reason and backend.name not in _missed and not torch.compiler.is_compiling():
        _missed.add(backend.name)
        warnings.warn(f"LOT attention runs without its {backend.name!r} backend: {reason}", stacklevel=4)
    return reason is None
