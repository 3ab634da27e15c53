"""The learned pivot measure: r points and their masses, one set per head."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from .checks import require_count, require_moderate
from .undecayed import Undecayed

PivotInit = Literal["small", "unit", "data"]


class PivotMeasure(nn.Module):
    """`σ = Σ_t p0_t δ_{z_t}` with learned points `z (H, R, D)` and learned masses `p0 (H, R)`.

    Args:
        learn_masses: learn the masses from uniform, `p0 = softmax(logits / mass_temperature)`.
        init: "unit" draws pivots from N(0, unit²), for training from scratch; "small" from N(0, 0.02²), a nearly
            uniform start that trained checkpoints convert best from; "data" starts as "small" and waits for
            `initialize_from`.
        unit: the deviation of pivots at which the scores of unit-variance tokens, over ε, deviate by one. Sharper
            plans are saturated before anything is learned: they send no gradient.
    """

    def __init__(
        self,
        num_heads: int,
        rank: int,
        head_dim: int,
        *,
        learn_masses: bool = True,
        mass_temperature: float = 1.0,
        init: PivotInit = "unit",
        unit: float = 1.0,
    ) -> None:
        super().__init__()
        require_count("rank", rank)
        require_moderate("mass_temperature", mass_temperature)
        if init not in get_args(PivotInit):
            raise ValueError(f"init must be one of {', '.join(map(repr, get_args(PivotInit)))}, got {init!r}.")
        self.rank = rank
        self.init = init
        self.unit = unit
        self.mass_temperature = mass_temperature
        self.points = Undecayed(num_heads, rank, head_dim)
        self.logits = Undecayed(num_heads, rank, learn=learn_masses)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.points.bias, std=self.unit if self.init == "unit" else 0.02)
        nn.init.zeros_(self.logits.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Points `(H, R, D)` and normalised log masses `(H, R)`, in the precision to compute with tokens `x`."""
        return self.points(x), self.log_masses(x)

    def log_masses(self, x: Tensor) -> Tensor:
        """The normalised log masses alone."""
        logits = self.logits(x)
        return (logits if self.mass_temperature == 1 else logits / self.mass_temperature).log_softmax(-1)

    @torch.no_grad()
    def initialize_from(self, tokens: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> None:
        """Place the pivots on tokens `(B, H, N, D)` drawn from real data, times `scale`."""
        num_heads, rank, head_dim = self.points.bias.shape
        if tokens.dim() != 4 or tokens.shape[1] != num_heads or tokens.shape[3] != head_dim:
            raise ValueError(f"expected tokens (B, {num_heads}, N, {head_dim}), got {tuple(tokens.shape)}.")
        by_head = tokens.transpose(0, 1).flatten(1, 2)
        if mask is not None:
            by_head = by_head[:, mask.flatten()]
        if by_head.shape[1] == 0:
            raise ValueError("no real token to place pivots on: the mask is False everywhere.")
        # a permutation draws without repetition; with fewer tokens than pivots it starts over
        order = torch.cat([torch.randperm(by_head.shape[1]) for _ in range(-(-rank // by_head.shape[1]))])[:rank].to(
            by_head.device
        )
        self.points.bias.copy_(scale * by_head[:, order])

    def extra_repr(self) -> str:
        return f"init={self.init!r}, mass_temperature={self.mass_temperature:g}"
