"""LOT attention as a mechanism: the operator with its learned pivots, masses and ε."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor, nn

from ..nn.depthwise import ConvKind, DepthwiseMixing
from ..nn.key_masses import KeyMasses, KeyMassKind
from ..nn.pivot_pooling import PivotKind, PivotPooling
from ..nn.pivots import PivotInit, PivotMeasure
from ..nn.prefix import PrefixRows
from ..ops import Coupling, coupling, lot_attention
from ..ops.problem import Solver
from .base import Attention, Cost, Entry
from .masking import zero_padding


class LOT(Attention):
    """Doubly stochastic, linear-time attention through a learned pivot measure.

    Args:
        rank: number of pivots R. eps: entropic regularisation ε; `learn_eps` makes it a parameter per head.
        solver, iters, tol, scale, backend: as in `lotformer.lot_attention`.
        learn_masses, mass_temperature, pivot_init: as in `PivotMeasure`.
        pivots: "fixed", or "input-aware": moved to where the keys are (`PivotPooling`).
        key_masses: "uniform" (doubly stochastic), "linear" or "query-aware", as in `KeyMasses`.
        dropout: probability of dropping a key in training.
        prefix_tokens: this many leading tokens read by softmax (`PrefixRows`, with `prefix_beta`,
            `polarize_prefix`, `polarize_powers`); the rest is coupled among itself.
        local_conv, kernel_size: add a depthwise convolution of the values, "1d" or "2d", to the tokens after the
            prefix.
    """

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        *,
        rank: int = 32,
        eps: float = 1.0,
        iters: int = 5,
        solver: Solver = "sinkhorn",
        tol: float | None = 1e-6,
        scale: float | None = None,
        learn_eps: bool = False,
        learn_masses: bool = True,
        mass_temperature: float = 1.0,
        pivot_init: PivotInit = "unit",
        pivots: PivotKind = "fixed",
        key_masses: KeyMassKind = "uniform",
        dropout: float = 0.0,
        prefix_tokens: int = 0,
        prefix_beta: float | None = None,
        polarize_prefix: bool = False,
        polarize_powers: tuple[float, float] = (1.0, 0.5),
        local_conv: ConvKind | None = None,
        kernel_size: int = 3,
        backend: str | None = None,
    ) -> None:
        super().__init__(head_dim, num_heads)
        if not eps > 0:
            raise ValueError(f"eps must be above 0, got {eps}.")
        if solver not in get_args(Solver):
            raise ValueError(f"solver must be one of {', '.join(map(repr, get_args(Solver)))}, got {solver!r}.")
        if iters < 1:
            raise ValueError(f"iters must be at least 1, got {iters}.")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be a probability in [0, 1), got {dropout}.")
        if pivots not in get_args(PivotKind):
            raise ValueError(f"pivots must be one of {', '.join(map(repr, get_args(PivotKind)))}, got {pivots!r}.")
        if prefix_tokens < 0:
            raise ValueError(f"prefix_tokens must be at least 0, got {prefix_tokens}.")
        if polarize_prefix and not prefix_tokens:
            raise ValueError("polarize_prefix needs prefix_tokens: there is no prefix row to polarise.")
        self.pivots = PivotMeasure(
            num_heads,
            rank,
            head_dim,
            learn_masses=learn_masses,
            mass_temperature=mass_temperature,
            init=pivot_init,
        )
        self.pooling = PivotPooling(num_heads, rank, head_dim, pull=eps) if pivots == "input-aware" else None
        self.log_eps = nn.Parameter(torch.full((num_heads,), eps).log()) if learn_eps else None
        self.fixed_eps = eps
        self.solver: Solver = solver
        self.iters = iters
        self.tol = tol
        self.scale = scale
        self.dropout = dropout
        self.backend = backend
        self.key_masses = KeyMasses(num_heads, head_dim, key_masses)
        self.prefix_tokens = prefix_tokens
        self.prefix = (
            PrefixRows(prefix_beta, polarize=polarize_prefix, powers=polarize_powers) if prefix_tokens else None
        )
        self.local = DepthwiseMixing(num_heads * head_dim, local_conv, kernel_size) if local_conv is not None else None

    @property
    def eps(self) -> float | Tensor:
        """The regularisation in force: the constructor's, or the learned one per head."""
        return self.fixed_eps if self.log_eps is None else self.log_eps.exp()

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        *,
        grid: tuple[int, int] | None = None,
    ) -> Tensor:
        if (self.prefix is not None or self.local is not None) and q.shape[2] != k.shape[2]:
            raise ValueError(
                f"prefix tokens and local mixing need self-attention, got {q.shape[2]} queries and {k.shape[2]} keys."
            )
        body = self._body
        out = lot_attention(
            body(q),
            body(k),
            body(v),
            **self._measures(q, k, key_mask, query_mask),
            dropout_p=self.dropout if self.training else 0.0,
            backend=self.backend,
        )
        if self.local is not None:
            mixed = self.local(body(zero_padding(v, key_mask)), grid)
            out = out + zero_padding(mixed, None if query_mask is None else query_mask[:, self.prefix_tokens :])
        if self.prefix is None:
            return out
        clean_k, clean_v = zero_padding(k, key_mask), zero_padding(v, key_mask)
        head = zero_padding(q, query_mask)[:, :, : self.prefix_tokens]
        rows = self.prefix(head, clean_k, clean_v, key_mask)
        rows = zero_padding(rows, None if query_mask is None else query_mask[:, : self.prefix_tokens])
        return torch.cat([rows, out], 2)

    def coupling(
        self, q: Tensor, k: Tensor, key_mask: Tensor | None = None, query_mask: Tensor | None = None
    ) -> Coupling:
        """The plans this mechanism uses on `q` and `k`, among the tokens after the prefix."""
        self._check(q, k, k, key_mask, query_mask)
        return coupling(self._body(q), self._body(k), **self._measures(q, k, key_mask, query_mask))

    @property
    def is_matrix(self) -> bool:
        """A convolution per channel is not one matrix per head."""
        return self.local is None

    def no_weight_decay(self) -> set[str]:
        """Parameters that live in the space of tokens or of log masses: decay would pull them to nowhere."""
        return {name for name, _ in self.named_parameters() if not name.startswith("local.")}

    def _body(self, x: Tensor) -> Tensor:
        return x[:, :, self.prefix_tokens :] if self.prefix_tokens else x

    def _measures(self, q: Tensor, k: Tensor, key_mask: Tensor | None, query_mask: Tensor | None) -> dict[str, Any]:
        """The arguments of the operator that describe the three measures and how to couple them."""
        key_mask, query_mask = (
            None if mask is None else mask[:, self.prefix_tokens :] for mask in (key_mask, query_mask)
        )
        points = self.pivots.points
        return {
            "pivots": points if self.pooling is None else points + self.pooling(self._body(k), key_mask),
            "log_masses": self.pivots.log_masses(),
            "eps": self.eps,
            "solver": self.solver,
            "iters": self.iters,
            "tol": self.tol,
            "scale": self.scale,
            "query_mask": query_mask,
            "key_mask": key_mask,
            "key_masses": self.key_masses(self._body(q), self._body(k), key_mask, query_mask),
        }


def cost(n: int, d: int, *, rank: int = 32, iters: int = 5, pivots: PivotKind = "fixed", **_: object) -> Cost:
    """Four n·r·d products and 2T+1 passes over two n·r kernels; the fused kernel moves q, k, v and out once.

    Input-aware pivots add two products and the n·r matrix between them.
    """
    pooling = Cost(flops=4.0 * n * rank * d, bytes=8.0 * n * d + 8.0 * n * rank)
    transport = Cost(flops=8.0 * n * rank * d + 8.0 * iters * n * rank, bytes=16.0 * n * d)
    if pivots == "fixed":
        return transport
    return Cost(flops=transport.flops + pooling.flops, bytes=transport.bytes + pooling.bytes)


ENTRY = Entry(
    name="lot",
    build=LOT,
    summary="Two entropic transport plans glued at a learned pivot measure.",
    citation="Shahbazi et al. 2026, LOTFormer: Doubly-Stochastic Linear Attention via Low-Rank Optimal Transport",
    cost=cost,
    time="n",
    doubly_stochastic="converged",
)
