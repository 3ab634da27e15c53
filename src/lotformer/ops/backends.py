"""Which implementations of the operator there are, which can run a given problem, and why not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import cpu, reference, triton
from .problem import Run, Solve, Transport


@dataclass(frozen=True)
class Backend:
    """An implementation of the operator.

    `why_unavailable()` explains why it cannot run on this machine at all, `why_unsupported(transport, solve)` why
    it cannot run this problem; both return None when it can.
    """

    name: str
    run: Run
    why_unavailable: Callable[[], str | None]
    why_unsupported: Callable[[Transport, Solve], str | None]


REFERENCE = Backend("reference", reference.run, lambda: None, lambda transport, solve: None)

BACKENDS: tuple[Backend, ...] = (
    Backend("cpu", cpu.run, cpu.why_unavailable, cpu.why_unsupported),
    Backend("triton", triton.run, triton.why_unavailable, triton.why_unsupported),
    REFERENCE,
)
"""In order of preference; the reference comes last and runs everything."""


def choose(transport: Transport, solve: Solve, name: str | None) -> Backend:
    """The best backend for the problem, or the named one, or an error that says why it cannot be used."""
    if name is None:
        if torch.compiler.is_exporting():
            return REFERENCE  # an exported program should run where this package's kernels are not
        for backend in BACKENDS:
            if backend.why_unsupported(transport, solve) is None and _is_available(backend):
                return backend
    named = {backend.name: backend for backend in BACKENDS}
    if name not in named:
        raise ValueError(f"`backend`: expected None or one of {', '.join(map(repr, named))}, got {name!r}.")
    backend = named[name]
    reason = backend.why_unavailable() or backend.why_unsupported(transport, solve)
    if reason:
        raise ValueError(f"backend {name!r} cannot be used here: {reason} Use `backend=None` to let it be chosen.")
    return backend


_missed: set[str] = set()


def _is_available(backend: Backend) -> bool:
    """Whether it runs on this machine; the first time a suitable backend does not, say so."""
    reason = backend.why_unavailable()
    if reason and backend.name not in _missed and not torch.compiler.is_compiling():
        _missed.add(backend.name)
        warnings.warn(f"LOT attention runs without its {backend.name!r} backend: {reason}", stacklevel=5)
    return reason is None
