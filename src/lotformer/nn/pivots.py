"""The learned pivot measure: r points and their masses, one set per head."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from .checks import require_count

PivotInit = Literal["small", "unit", "data"]


class PivotMeasure(nn.Module):
    """`σ = Σ_t p0_t δ_{z_t}` with learned support `z (H, R, D)` and learned masses `p0 (H, R)`.

    Args:
        learn_masses: learn the masses from uniform, `p0 = softmax(logits / mass_temperature)`.
        init: "small" draws pivots from N(0, 0.02²), a nearly uniform start that trained checkpoints convert best
            from; "unit" from N(0, 1), for training from scratch at ε ≈ 1; "data" starts as "small" and waits for
            `initialize_from`.
    """

    logits: Tensor

    def __init__(
        self,
        num_heads: int,
        rank: int,
        head_dim: int,
        *,
        learn_masses: bool = True,
        mass_temperature: float = 1.0,
        init: PivotInit = "unit",
    ) -> None:
        super().__init__()
        require_count("rank", rank)
        if not mass_temperature > 0:
            raise ValueError(f"mass_temperature must be above 0, got {mass_temperature}.")
        if init not in get_args(PivotInit):
            raise ValueError(f"init must be one of {', '.join(map(repr, get_args(PivotInit)))}, got {init!r}.")
        self.init = init
        self.mass_temperature = mass_temperature
        self.points = nn.Parameter(torch.empty(num_heads, rank, head_dim))
        logits = torch.zeros(num_heads, rank)
        if learn_masses:
            self.logits = nn.Parameter(logits)
        else:
            self.register_buffer("logits", logits)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.points, std=1.0 if self.init == "unit" else 0.02)
        with torch.no_grad():
            self.logits.zero_()

    @torch.no_grad()
    def initialize_from(self, tokens: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> None:
        """Place the pivots on tokens `(B, H, N, D)` drawn from real data, times `scale`."""
        num_heads, rank, head_dim = self.points.shape
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
        self.points.copy_(scale * by_head[:, order])

    def log_masses(self) -> Tensor:
        """Log masses `(H, R)`, normalised."""
        logits = self.logits if self.mass_temperature == 1 else self.logits / self.mass_temperature
        return logits.log_softmax(-1, dtype=torch.float32)

    def extra_repr(self) -> str:
        num_heads, rank, head_dim = self.points.shape
        return f"{num_heads=}, {rank=}, {head_dim=}, learn_masses={isinstance(self.logits, nn.Parameter)}"
