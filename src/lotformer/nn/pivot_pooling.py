"""Pivots as a function of the input: what a head needs that looks for the same token elsewhere."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from ..ops.precision import no_autocast
from .softmax import fused_softmax
from .undecayed import Undecayed

PivotKind = Literal["fixed", "input-aware", "found"]


class PivotPooling(nn.Module):
    """Moves the pivots of a head to where the keys of a sample are: by `γ_h Σ_j softmax_j(u_t·k_j) k_j` for pivot t.

    Fixed pivots sort tokens into kinds, the same for every input. That a token occurs twice can only be seen by pivots
    that know which tokens there are. The plans stay what they were, whatever the pivots: exact, rank R, linear in the
    tokens. `u` starts at random, so that every pivot picks keys of its own; `γ` starts at `pull`: with ε there, the
    scores of the queries start at softmax's logits for the pooled keys.
    """

    def __init__(self, num_heads: int, rank: int, head_dim: int, *, pull: float = 1.0) -> None:
        super().__init__()
        self.initial_pull = pull
        self.directions = Undecayed(num_heads, rank, head_dim)
        self.pull = Undecayed(num_heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.directions.bias, std=0.2)
        nn.init.constant_(self.pull.bias, self.initial_pull)

    def forward(self, k: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """The shift of the pivots, `(B, H, R, D)`, for keys `(B, H, M, D)`; zero for a sample without keys."""
        with no_autocast(k.device.type):
            directions = self.directions(k)
            k = k.to(directions.dtype)
            if k.shape[2] == 0:
                return torch.zeros_like(directions).expand(k.shape[0], -1, -1, -1)
            allowed = None
            if key_mask is not None:
                k = k.masked_fill(~key_mask[:, None, :, None], 0.0)
                allowed = key_mask[:, None, None, :]
            if k.shape[0] == 0:
                pooled = directions @ k.mT @ k  # nothing, with gradients of zero
            else:
                # a copy: how the fused kernel rounds depends on where in memory a parameter was loaded to
                vectors = directions.clone().expand(k.shape[0], -1, -1, -1)
                pooled = fused_softmax(vectors, k, k, allowed, scale=1.0)
            return self.pull(k)[:, None, None] * pooled

    def extra_repr(self) -> str:
        return f"initial_pull={self.initial_pull:g}"
