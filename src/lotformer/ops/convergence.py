"""A solve that did not converge is not passed over in silence."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from torch import Tensor

from .problem import Solve

_TOLERATED = 1e-3  # whatever was asked for, columns this close to their sums are no reason to worry
_warned = False


def tolerated(solve: Solve) -> float:
    """The largest residual that is no miss: a hundred tolerances, and never less than a thousandth."""
    return max(100 * _wanted(solve), _TOLERATED)


def warn_of_a_miss(residual: Callable[[], Tensor], solve: Solve) -> None:
    """Warn, once per process, if the residual `(B, H)` of an exact solve is far above its tolerance."""
    global _warned
    if _warned:
        return
    bound = tolerated(solve)
    missed = [x for of_sample in residual().tolist() for x in of_sample if not x <= bound]
    if missed:
        _warned = True
        warnings.warn(
            f"LOT attention reached a residual of {missed[0]:.1e}, not the {_wanted(solve):.1e} that was asked for: "
            "columns of A do not all sum to what they should. Raise `eps`, normalise queries and keys, or pass them in "
            "float64; `lotformer.ops.solve_attention` tells how far each head got. This is said once.",
            stacklevel=4,
        )


def _wanted(solve: Solve) -> float:
    return 1e-6 if solve.tol is None else solve.tol
