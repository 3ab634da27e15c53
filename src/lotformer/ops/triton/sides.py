"""The two sides of a problem, queries and keys: their tokens and masses, and how each is solved."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ..problem import LEAST_LOG_MASS
from .arguments import broadcast_strides
from .inputs import Inputs


@dataclass(frozen=True)
class Tokens:
    """The tokens of one side, with their masses and strides under the names the kernels use."""

    x: Tensor
    log_a: Tensor | None
    valid: Tensor | None

    @property
    def tokens(self) -> int:
        return self.x.shape[2]

    @property
    def uniform(self) -> float:
        return -math.log(self.tokens)

    def strides(self, x: str, *, masses: str = "a", valid: str = "valid") -> dict[str, int]:
        a_b, a_h = broadcast_strides(self.log_a)
        valid_b, valid_h = broadcast_strides(self.valid)
        x_b, x_h, x_n, _ = self.x.stride()
        return {
            f"{x}_b": x_b, f"{x}_h": x_h, f"{x}_n": x_n, f"{masses}_b": a_b, f"{masses}_h": a_h,
            f"{valid}_b": valid_b, f"{valid}_h": valid_h,
        }  # fmt: skip


@dataclass(frozen=True)
class Side(Tokens):
    """And how they are solved.

    Attributes:
        log_m: masses of the pivots that the side is solved for, `(H,R)` or `(B,H,R)`.
        slots: how many potentials are kept. slot: that of which the plan is made.
        sweeps: how many lie between the first slot and the last that has a gradient.
    """

    log_m: Tensor
    solved: bool
    slots: int
    slot: int
    sweeps: int


def queries_of(inputs: Inputs) -> Side:
    slots, slot = inputs.slots[0], inputs.plan_slots[0]
    tokens = (inputs.q, inputs.query_log_a, inputs.query_valid)
    return Side(*tokens, inputs.log_m, inputs.balance == "both", slots, slot, sweeps=slots - 1)


def keys_of(inputs: Inputs, query_g: Tensor) -> Side:
    """The keys as the queries' potentials leave them."""
    slots, slot = inputs.slots[1], inputs.plan_slots[1]
    log_m = _normalised(inputs, log_sent(inputs, query_g)) if inputs.balance == "keys" else inputs.log_m
    tokens = (inputs.k, inputs.key_log_a, inputs.key_valid)
    return Side(*tokens, log_m, inputs.balance != "none", slots, slot, sweeps=max(slot, 0))


def log_sent(inputs: Inputs, query_g: Tensor) -> Tensor:
    """`log m' (B,H,R)`, what queries that are not solved send: a sweep makes `2 log m - log m'` of `log m`."""
    return 2 * inputs.log_m - query_g[:, :, 1]


def _normalised(inputs: Inputs, log_masses: Tensor) -> Tensor:
    return log_masses.clamp_min(least_log_mass(inputs)).log_softmax(-1)


def least_log_mass(inputs: Inputs) -> float:
    return LEAST_LOG_MASS["newton" if inputs.newton else "sinkhorn"]
