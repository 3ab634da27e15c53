"""LOT attention as a mechanism: the operator with its learned pivots, masses and ε."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, cast, get_args

import torch
from torch import Tensor, nn

from ..nn.checks import require_count, require_positive
from ..nn.depthwise import ConvKind, DepthwiseMixing
from ..nn.key_masses import KeyMasses, KeyMassKind
from ..nn.pivot_pooling import PivotKind, PivotPooling
from ..nn.pivots import PivotInit, PivotMeasure
from ..nn.prefix import PrefixRows
from ..nn.undecayed import Undecayed
from ..ops import Coupling, coupling, lot_attention
from ..ops.problem import Balance, Solver
from .base import Attention, Cost, Entry
from .masking import zero_padding
from .options import Option, documents, with_defaults

if TYPE_CHECKING:
    from typing_extensions import Unpack


class LOTOptions(TypedDict, total=False):
    """The options of LOT attention, stated once: the mechanism and the layer take all of them."""

    rank: Annotated[
        int, Option(32, "number of pivots R, which bounds the rank of the attention matrix; the cost is O(N·R).")
    ]
    eps: Annotated[float, Option(1.0, "entropic regularisation ε, above 0; small is sharp.")]
    solver: Annotated[
        Solver,
        Option(
            "sinkhorn",
            '"sinkhorn" runs a fixed number of sweeps, right at ε ≈ 1; "newton" solves to `tol`, right for small ε '
            "and for exact column sums.",
        ),
    ]
    iters: Annotated[
        int,
        Option(
            5,
            "full Sinkhorn sweeps, two half-steps each, before the closing half-step: 5 are 11 half-steps. Published "
            "code counts half-steps: its `max_iter=5` is `iters=2`.",
        ),
    ]
    tol: Annotated[
        float | None, Option(1e-6, "relative error of the column sums at which Newton stops; None: fixed passes.")
    ]
    scale: Annotated[float | None, Option(None, "factor of the scores, D^-1/2 by default.")]
    balance: Annotated[
        Balance,
        Option(
            "both",
            'which sums are imposed beside unit rows: "both" is the paper\'s; "keys" keeps the column sums for half '
            'the work, with the masses of the pivots as a prior; "none" imposes nothing and solves nothing.',
        ),
    ]
    learn_eps: Annotated[bool, Option(False, "make ε a parameter, one per head, that starts at `eps`.")]
    learn_masses: Annotated[bool, Option(True, "learn the masses of the pivots, starting from uniform.")]
    mass_temperature: Annotated[float, Option(1.0, "the masses are softmax(logits / mass_temperature).")]
    pivot_init: Annotated[
        PivotInit,
        Option(
            "unit",
            '"unit" draws pivots from N(0, 1), for training from scratch at ε ≈ 1; "small" from N(0, 0.02²), for '
            'trained checkpoints; "data" starts as "small" and waits for `mechanism.pivots.initialize_from`.',
        ),
    ]
    pivots: Annotated[
        PivotKind,
        Option("fixed", '"fixed", or "input-aware": moved to where the keys of the sample are (`PivotPooling`).'),
    ]
    key_masses: Annotated[
        KeyMassKind,
        Option(
            "uniform", '"uniform" is doubly stochastic; "linear" and "query-aware" learn column sums (`KeyMasses`).'
        ),
    ]
    prefix_tokens: Annotated[
        int,
        Option(
            0,
            "this many leading tokens ([CLS], registers) read the whole sequence by softmax; the tokens after them are "
            "coupled among themselves. A sequence may consist of prefix tokens alone, but may not be shorter.",
        ),
    ]
    prefix_beta: Annotated[float | None, Option(None, "temperature of the prefix rows, D^-1/2 by default.")]
    polarize_prefix: Annotated[
        bool, Option(False, "let prefix rows score like and opposite signs apart (`PrefixRows`).")
    ]
    polarize_powers: Annotated[
        tuple[float, float], Option((1.0, 0.5), "the powers of the like and the opposite scores.")
    ]
    local_conv: Annotated[
        ConvKind | None,
        Option(
            None,
            'add a depthwise convolution of the values after the prefix: "1d" along the sequence, "2d" on the grid.',
        ),
    ]
    kernel_size: Annotated[int, Option(3, "width of that convolution, odd.")]
    backend: Annotated[str | None, Option(None, "None picks the fastest that can run the problem; a name forces it.")]


@documents(LOTOptions)
class LOT(Attention):
    """Doubly stochastic, linear-time attention through a learned pivot measure.

    Args:
        dropout: probability of dropping a key in training, the same keys for every query of a head.
        {options}
    """

    def __init__(self, head_dim: int, num_heads: int, *, dropout: float = 0.0, **options: Unpack[LOTOptions]) -> None:
        super().__init__(head_dim, num_heads)
        o = cast(LOTOptions, with_defaults(LOTOptions, options))
        require_positive("eps", o["eps"])
        _require_one_of("solver", o["solver"], Solver)
        _require_one_of("balance", o["balance"], Balance)
        _require_one_of("pivots", o["pivots"], PivotKind)
        require_count("iters", o["iters"])
        require_count("prefix_tokens", o["prefix_tokens"], least=0)
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be a probability in [0, 1), got {dropout}.")
        if o["polarize_prefix"] and not o["prefix_tokens"]:
            raise ValueError("polarize_prefix needs prefix_tokens: there is no prefix row to polarise.")
        self.pivots = PivotMeasure(
            num_heads,
            o["rank"],
            head_dim,
            learn_masses=o["learn_masses"],
            mass_temperature=o["mass_temperature"],
            init=o["pivot_init"],
        )
        aware = o["pivots"] == "input-aware"
        self.pooling = PivotPooling(num_heads, o["rank"], head_dim, pull=o["eps"]) if aware else None
        self.fixed_eps = o["eps"]
        self.log_eps = Undecayed(num_heads) if o["learn_eps"] else None
        self.solver = o["solver"]
        self.iters = o["iters"]
        self.tol = o["tol"]
        self.scale = o["scale"]
        self.balance = o["balance"]
        self.dropout = dropout
        self.backend = o["backend"]
        self.key_masses = KeyMasses(num_heads, head_dim, o["key_masses"])
        self.prefix_tokens = o["prefix_tokens"]
        self.prefix = (
            PrefixRows(o["prefix_beta"], polarize=o["polarize_prefix"], powers=o["polarize_powers"])
            if self.prefix_tokens
            else None
        )
        conv, width = o["local_conv"], num_heads * head_dim
        self.local = DepthwiseMixing(width, conv, o["kernel_size"]) if conv is not None else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start ε where it was told to; the parts start themselves."""
        if self.log_eps is not None:
            nn.init.constant_(self.log_eps.bias, math.log(self.fixed_eps))

    @property
    def eps(self) -> float | Tensor:
        """The regularisation in force: the constructor's, or the learned one per head."""
        return self.fixed_eps if self.log_eps is None else self.log_eps.bias.exp()

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
        if q.shape[2] < self.prefix_tokens:
            raise ValueError(f"prefix_tokens={self.prefix_tokens}, but the sequence has {q.shape[2]} tokens.")
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
        measures = self._measures(q, k, key_mask, query_mask)
        return coupling(self._body(q), self._body(k), **measures, backend=self.backend)

    @property
    def is_matrix(self) -> bool:
        """A convolution per channel is not one matrix per head."""
        return self.local is None

    def _body(self, x: Tensor) -> Tensor:
        return x[:, :, self.prefix_tokens :] if self.prefix_tokens else x

    def _measures(self, q: Tensor, k: Tensor, key_mask: Tensor | None, query_mask: Tensor | None) -> dict[str, Any]:
        """The arguments of the operator that describe the three measures and how to couple them."""
        key_mask, query_mask = (
            None if mask is None else mask[:, self.prefix_tokens :] for mask in (key_mask, query_mask)
        )
        points, log_masses = self.pivots(k)
        return {
            "pivots": points if self.pooling is None else points + self.pooling(self._body(k), key_mask),
            "log_masses": log_masses,
            "eps": self.eps,
            "solver": self.solver,
            "iters": self.iters,
            "tol": self.tol,
            "scale": self.scale,
            "balance": self.balance,
            "query_mask": query_mask,
            "key_mask": key_mask,
            "key_masses": self.key_masses(self._body(q), self._body(k), key_mask, query_mask),
        }


def _require_one_of(name: str, value: str, kind: Any) -> None:
    if value not in get_args(kind):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, get_args(kind)))}, got {value!r}.")


_SOLVED_SIDES: dict[Balance, int] = {"both": 2, "keys": 1, "none": 0}


def cost(
    n: int,
    d: int,
    *,
    rank: int = 32,
    iters: int = 5,
    pivots: PivotKind = "fixed",
    balance: Balance = "both",
    **_: object,
) -> Cost:
    """Four n·r·d products and T sweeps over the n·r kernel of each solved side; the fused kernel moves q, k, v and out
    once.

    Input-aware pivots add two products.
    """
    sweeps = 4.0 * _SOLVED_SIDES[balance] * iters * n * rank
    transport = Cost(flops=8.0 * n * rank * d + sweeps, bytes=16.0 * n * d)
    pooling = Cost(flops=4.0 * n * rank * d, bytes=8.0 * n * d)
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
