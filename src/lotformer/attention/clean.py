"""Padding and precision, once, for mechanisms written as a formula on clean tokens."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from ..ops.precision import no_autocast
from ..ops.reference import solve_dtype
from .base import Attention
from .inputs import Inputs


class CleanAttention(Attention):
    """A mechanism that implements `mix` and never meets padded content or half precision.

    `mix` receives padded tokens as zeros and everything in fp32 (fp64 for fp64 inputs) with autocast off. It must
    leave padded keys out of its sums; rows of padded queries, and samples without keys, are zeroed here.
    """

    def attend(self, inputs: Inputs) -> Tensor:
        with no_autocast(inputs.q.device.type):
            out = self.mix(inputs.cleaned(solve_dtype(inputs.q)))
        if inputs.key_mask is not None:
            out = out.masked_fill(~inputs.key_mask.any(-1)[:, None, None, None], 0.0)
        return inputs.finished(out)

    @abstractmethod
    def mix(self, inputs: Inputs) -> Tensor:
        """The mechanism's formula on clean tokens: `(B, H, N, Dv)` in the dtype of the queries."""
