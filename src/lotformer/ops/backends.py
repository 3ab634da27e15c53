"""Which implementations of the operator there are, which can run a given problem, and why not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from . import reference, triton
from .problem import Problem


@dataclass(frozen=True)
class Backend:
    """An implementation of the operator.

    `why_unavailable()` explains why it cannot run on this machine at all, `why_unsupported(problem)` why it
    cannot run this problem; both return None when it can.
    """

    name: str
    run: Callable[[Problem], Tensor]
    why_unavailable: Callable[[], str | None]
    why_unsupported: Callable[[Problem], str | None]


_REFERENCE = Backend("reference", reference.run, lambda: None, lambda problem: None)

_TRITON = Backend("triton", triton.run, triton.why_unavailable, triton.why_unsupported)

BACKENDS: tuple[Backend, ...] = (_TRITON, _REFERENCE)
"""In order of preference; the reference comes last and runs everything."""


def choose(problem: Problem, name: str | None) -> Backend:
    """The best backend for the problem, or the named one, or an error that says why it cannot be used."""
    if name is None:
        return next(b for b in BACKENDS if not b.why_unavailable() and not b.why_unsupported(problem))
    backend = next((b for b in BACKENDS if b.name == name), None)
    if backend is None:
        known = ", ".join(repr(b.name) for b in BACKENDS)
        raise ValueError(f"`backend`: expected None or one of {known}, got {name!r}.")
    reason = backend.why_unavailable() or backend.why_unsupported(problem)
    if reason:
        raise ValueError(f"backend {name!r} cannot be used here: {reason} Use `backend=None` to let it be chosen.")
    return backend
