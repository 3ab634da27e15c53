"""Attention layers that drop into a transformer block: projections around a mechanism from the registry."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import attention
from .nn.depthwise import ConvKind
from .nn.key_masses import KeyMassKind
from .nn.pivot_pooling import PivotKind
from .nn.pivots import PivotInit
from .ops.attention import CAUSAL_REFUSAL
from .ops.problem import Solver


class AttentionLayer(nn.Module):
    """Self-attention `(B, N, dim) → (B, N, dim)` with any mechanism of the registry between the projections.

    Sub-modules are named as timm names them (`qkv`, `proj`), so state dicts carry over.

    Args:
        mechanism: a name from `lotformer.attention.names()`; `options` are that mechanism's own.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        mechanism: str = "softmax",
        *,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"dim must be a multiple of num_heads, got dim={dim} and num_heads={num_heads}.")
        self.mechanism = mechanism
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.attn = attention.build(mechanism, head_dim=self.head_dim, num_heads=num_heads, **options)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        grid: tuple[int, int] | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Mix the tokens of `x (B, N, dim)`; `mask (B, N)` is True on real tokens, `grid` the 2-D token layout."""
        if is_causal:
            raise ValueError(CAUSAL_REFUSAL if self.mechanism == "lot" else "`is_causal`: this layer looks both ways.")
        if x.dim() != 3 or x.shape[2] != self.qkv.in_features:
            raise ValueError(f"`x`: expected (B, N, {self.qkv.in_features}), got {tuple(x.shape)}.")
        batch, length, dim = x.shape
        if mask is not None and (mask.dtype != torch.bool or mask.shape != (batch, length)):
            expected = f"a boolean mask ({batch}, {length}), True = a real token"
            raise ValueError(f"`mask`: expected {expected}, got {mask.dtype} {tuple(mask.shape)}.")
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        out = self.attn(q, k, v, mask, mask, grid=grid)
        return self.proj_drop(self.proj(out.transpose(1, 2).reshape(batch, length, dim)))

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that should not decay, for optimisers that ask (timm's do)."""
        inner = getattr(self.attn, "no_weight_decay", set)
        return {f"attn.{name}" for name in inner()}


class LOTAttention(AttentionLayer):
    """LOT attention as a drop-in layer: linear in the sequence, doubly stochastic, rank at most `rank`.

    The arguments between the projections are those of `lotformer.attention.lot.LOT`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        rank: int = 32,
        eps: float = 1.0,
        iters: int = 5,
        solver: Solver = "sinkhorn",
        *,
        tol: float | None = 1e-6,
        learn_eps: bool = False,
        learn_masses: bool = True,
        mass_temperature: float = 1.0,
        pivot_init: PivotInit = "unit",
        pivots: PivotKind = "fixed",
        key_masses: KeyMassKind = "uniform",
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        prefix_tokens: int = 0,
        prefix_beta: float | None = None,
        polarize_prefix: bool = False,
        polarize_powers: tuple[float, float] = (1.0, 0.5),
        local_conv: ConvKind | None = None,
        kernel_size: int = 3,
        backend: str | None = None,
    ) -> None:
        super().__init__(
            dim,
            num_heads,
            "lot",
            qkv_bias=qkv_bias,
            proj_drop=proj_drop,
            rank=rank,
            eps=eps,
            iters=iters,
            solver=solver,
            tol=tol,
            learn_eps=learn_eps,
            learn_masses=learn_masses,
            mass_temperature=mass_temperature,
            pivot_init=pivot_init,
            pivots=pivots,
            key_masses=key_masses,
            dropout=attn_drop,
            prefix_tokens=prefix_tokens,
            prefix_beta=prefix_beta,
            polarize_prefix=polarize_prefix,
            polarize_powers=polarize_powers,
            local_conv=local_conv,
            kernel_size=kernel_size,
            backend=backend,
        )
