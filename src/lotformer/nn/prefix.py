"""Special tokens ([CLS], distillation, registers) in front of the sequence: rows that pool by softmax."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .. import ops
from ..ops.plain.pooling import pool_by_scores
from .checks import is_number, require_moderate
from .softmax import softmax_of_real

DEFAULT_POWERS = (1.0, 0.5)
_LARGEST_POWER = 8  # of scores of thousands, in fp32


def require_rows(beta: Any, powers: Any) -> None:
    """Refuse a temperature or powers that no softmax survives."""
    if beta is not None:
        require_moderate("prefix_beta", beta)
    two = isinstance(powers, tuple | list) and len(powers) == 2
    if not two or not all(is_number(power) and 0 < power <= _LARGEST_POWER for power in powers):
        raise ValueError(
            f"the powers of polarisation must be two numbers above 0, at most {_LARGEST_POWER}, got {powers}."
        )


class PrefixRows(nn.Module):
    """Softmax attention of the first few rows over the whole sequence.

    A doubly stochastic row cannot pool: it may take no more than one token's worth from any key. The special
    tokens therefore read by `softmax_j(β q·k_j)`, or with `polarize` by the softmax of

        (β (q⁺·k_j⁺ + q⁻·k_j⁻))^p_s + (β (q⁺·k_j⁻ + q⁻·k_j⁺))^p_o,     x⁺ = relu(x), x⁻ = relu(−x)

    Args:
        beta: temperature β; by default `D^-1/2`, and 1 with `polarize`, as the paper prints it: below its power, a
            small β lets the opposite term rule, and the row reads where q·k is low.
        powers: `(p_s, p_o)` of like and opposite signs. The paper does not state its own.
    """

    def __init__(
        self, beta: float | None = None, *, polarize: bool = False, powers: tuple[float, float] = DEFAULT_POWERS
    ) -> None:
        super().__init__()
        require_rows(beta, powers)
        self.beta = beta
        self.polarize = polarize
        self.powers = powers

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, *, backend: str | None = None
    ) -> Tensor:
        """Rows `(B, H, P, Dv)` for the special queries `(B, H, P, D)` and all keys and values.

        Padded keys and values may hold anything, queries may not.
        """
        beta = self.temperature(q.shape[-1])
        if self.polarize:
            return ops.pool(q, k, v, key_mask, beta, self.powers, backend=backend)
        return softmax_of_real(q, k, v, key_mask, beta)

    def temperature(self, head_dim: int) -> float:
        """β in force."""
        if self.beta is not None:
            return self.beta
        return 1.0 if self.polarize else head_dim**-0.5

    def is_softmax(self, head_dim: int) -> bool:
        """True if these rows equal those of softmax attention."""
        return not self.polarize and self.temperature(head_dim) == head_dim**-0.5

    def pool(self, scores: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Rows `(B, H, P, Dv)` for finite scores `(B, H, P, M)` with all keys, β included; padded values are clean."""
        return pool_by_scores(scores, v, key_mask)

    def extra_repr(self) -> str:
        return f"beta={self.beta}, polarize={self.polarize}, powers={self.powers}"
