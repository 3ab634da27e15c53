"""LOT attention as a mechanism: the operator with its learned pivots, masses and ε."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..nn.found_pivots import FoundPivots
from ..nn.windows import window_cost
from ..ops import Coupling, couple, solve_attention
from ..ops.attention import drop_keys
from ..ops.problem import Balance
from .base import Cost, Entry
from .config import OPTIONS, LOTConfig, Sinkhorn
from .inputs import Inputs
from .lot_parts import LOTParts
from .lot_scores import ScoreSides, is_cheaper, reads_of
from .lot_sides import Sides, TokenSides, clean_prefix
from .masking import zero_padding
from .options import documents
from .unformed import Linear, Projections

if TYPE_CHECKING:
    from typing_extensions import Self


@documents(OPTIONS)
class LOT(LOTParts):
    """Doubly stochastic, linear-time attention through a learned pivot measure.

    Args:
        config: every option as one `LOTConfig`, in place of the others.
        {options}
    """

    def __init__(self, head_dim: int, num_heads: int, config: LOTConfig | None = None, **options: Any) -> None:
        super().__init__(head_dim, num_heads, LOTConfig.of(config, options))

    def attend(self, inputs: Inputs) -> Tensor:
        sides = self._token_sides(inputs)
        if self._is_read_whole(max(inputs.q.shape[2], inputs.k.shape[2]), inputs.grid):
            v = self._dropped(inputs.v)
            if self.local is None and (self.prefix is None or self.prefix.is_softmax(self.head_dim)):
                return sides.softmax(v, prefix=True)
            return self._joined(sides, v, sides.softmax(v))
        return self._attended(sides) if self.found is None else self._through_groups(self.found, sides)

    def attend_unformed(
        self,
        x: Tensor,
        projections: Projections,
        values: Linear,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        *,
        grid: tuple[int, int] | None = None,
    ) -> Tensor:
        """`forward` for a layer with these projections and input `x (B, N, C)`, without forming queries and keys.

        Equal to rounding, with gradients for the projections. `why_formed` names the instances that cannot do it.
        """
        return self._attended(ScoreSides(self, reads_of(self, projections, x), x, values, key_mask, query_mask, grid))

    def _attended(self, sides: Sides) -> Tensor:
        """The output for sides in either form: near keys, the transport of the rest, the prefix, local mixing."""
        v = self._dropped(sides.v)
        near, share = sides.near(v)
        transport = sides.transport(v, share)
        out = solve_attention(transport, self.solve(sides.scale), self.config.backend).out
        if near is not None and share is not None:
            out = out.lerp(near.to(out.dtype), share[..., None].to(out.dtype))
            if torch.is_grad_enabled():  # both are zero at padding, but what comes back there may be anything
                out = zero_padding(out, transport.query_mask)
        return self._joined(sides, v, out)

    def _through_groups(self, found: FoundPivots, sides: TokenSides) -> Tensor:
        """The output where pivots are found in the sample: by their plans if those are balanced, else by softmax."""
        v, body, backend = self._dropped(sides.v), sides.body, self.config.backend
        if self.config.balance == "both":
            values = v[:, :, self.prefix_tokens :] if self.prefix_tokens else v
            out = found.balanced(
                body.q, body.k, values, self.solve(None), body.key_mask, body.query_mask, backend=backend
            )
        else:
            k, mask = sides.whole.k, sides.key_mask
            out = found(body.q, k, v, mask, body.grid, body.query_mask, backend=backend).out
        return self._joined(sides, v, out)

    def _dropped(self, v: Tensor) -> Tensor:
        """The values that rows read: the same keys are dropped for the prefix, the window and what is transported."""
        return drop_keys(v, self.config.dropout) if self.training and self.config.dropout > 0 else v

    def _joined(self, sides: Sides, v: Tensor, out: Tensor) -> Tensor:
        """The rows of the prefix, and behind them the output of the other tokens with local mixing added."""
        rows = None if self.prefix is None else sides.rows(v)
        if self.local is not None:
            return self.local.joined(
                rows, out, sides.v, sides.key_mask, sides.query_mask, sides.grid, backend=self.config.backend
            )
        if rows is None:
            return out
        rows = clean_prefix(rows, sides.query_mask)
        # token by token in memory, as the layer reads it next: one copy instead of two
        return torch.cat([rows.transpose(1, 2), out.transpose(1, 2)], 1).transpose(1, 2)

    def _is_read_whole(self, tokens: int, grid: tuple[int, int] | None) -> bool:
        """True if nothing is left to transport, or so little that fused softmax is faster (`softmax_up_to`).

        Not while learning, where parameters without a gradient would surprise whoever averages gradients over
        processes, nor for an exported model, whose length may not be known.
        """
        if torch.is_grad_enabled() or torch.compiler.is_exporting():
            return False
        return self._leaves_to_softmax(tokens, grid)

    def _leaves_to_softmax(self, tokens: int, grid: tuple[int, int] | None) -> bool:
        return tokens <= self.config.softmax_up_to or self._sees_all(tokens, grid)

    def coupling(
        self,
        q: Tensor,
        k: Tensor,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        *,
        grid: tuple[int, int] | None = None,
    ) -> Coupling:
        """The plans this mechanism uses on `q` and `k`, among the tokens after the prefix.

        With a window, the masses of the queries are what their rows leave to be transported; where that is nothing,
        the plan is not used. Pivots that are found transport all keys here, those of the window too.
        """
        self._check(q, k, k, key_mask, query_mask)
        sides = self._sides(Inputs(q, k, k, key_mask, query_mask, grid))
        if self.found is not None and isinstance(sides, TokenSides):
            q, k, _, key_mask, query_mask, _ = sides.body
            return self.found.coupling(q, k, self.solve(None), key_mask, query_mask, backend=self.config.backend)
        _, share = sides.near(None)
        return couple(sides.transport(None, share), self.solve(sides.scale), self.config.backend)

    def _sides(self, inputs: Inputs) -> Sides:
        """The sides that the arguments of `forward` stand for; values are not read."""
        return self._token_sides(inputs)

    def _token_sides(self, inputs: Inputs) -> TokenSides:
        parts = {"prefix tokens": self.prefix, "local mixing": self.local, "a window": self.config.window}
        needy = [name for name, part in parts.items() if part is not None]
        queries, keys = inputs.q.shape[2], inputs.k.shape[2]
        if needy and queries != keys:
            raise ValueError(f"{' and '.join(needy)}: self-attention only, got {queries} queries and {keys} keys.")
        self.require_prefix(queries)
        return TokenSides(self, inputs)

    def why_formed(self) -> str | None:
        """The reason why this instance needs its queries and keys formed, or None if it can read the input."""
        if self.found is not None:
            return "pivots are found among the keys"
        if self.near is not None:
            return "a window compares queries with keys"
        if self.config.softmax_up_to:
            return f"softmax_up_to={self.config.softmax_up_to} compares the queries of short inputs with their keys"
        return None if self.pooling is None else "input-aware pivots are pooled from the keys"

    def is_cheaper_unformed(self, width: int, tokens: int | None) -> bool:
        """True if `attend_unformed` takes fewer multiplications for `tokens` of `width` channels; None: very many."""
        return is_cheaper(self, width, tokens)

    def is_softmax(self, tokens: int, grid: tuple[int, int] | None = None) -> bool:
        """True if it computes softmax attention on a sequence this long: short, or within every window."""
        if self.local is not None or not self._leaves_to_softmax(tokens, grid):
            return False
        return self.prefix is None or self.prefix.is_softmax(self.head_dim)

    @property
    def is_matrix(self) -> bool:
        """A convolution per channel is not one matrix per head."""
        return self.local is None

    def without_local_mixing(self) -> Self:
        """The same attention on the same parameters without the convolution beside it: one matrix per head."""
        made = copy.copy(self)
        made._modules = {**self._modules, "local": None}
        return made


_SOLVED_SIDES: dict[Balance, int] = {"both": 2, "keys": 1, "none": 0}


def cost(n: int, d: int, config: LOTConfig | None = None, **options: Any) -> Cost:
    """Four n·r·d products and T sweeps over the n·r kernel of each solved side; the fused kernel moves q, k, v and out
    once.

    An exact solve counts as the default number of sweeps. Input-aware pivots add two products, a window two with the
    candidates of a token.
    """
    c = LOTConfig.of(config, options)
    if c.pivots.kind == "found":
        return _cost_of_found(n, d, c)
    sweeps = c.solver.sweeps if isinstance(c.solver, Sinkhorn) else Sinkhorn().sweeps
    flops, moved = 8.0 * n * c.rank * d + 4.0 * _SOLVED_SIDES[c.balance] * sweeps * n * c.rank, 16.0 * n * d
    if c.pivots.kind != "fixed":
        flops, moved = flops + 4.0 * n * c.rank * d, moved + 8.0 * n * d
    return _with_window(flops, moved, n, d, c)


def _cost_of_found(n: int, d: int, c: LOTConfig) -> Cost:
    """A product with the centres for each step and for the queries, two for the values; and the keys by content."""
    assert c.pivots.steps is not None
    flops, moved = 2.0 * (c.pivots.steps + 3) * n * c.rank * d, 16.0 * n * d
    if c.content is not None:
        flops += 4.0 * n * d * c.content.groups * min(c.content.most, n / c.rank)
    return _with_window(flops, moved, n, d, c)


def _with_window(flops: float, moved: float, n: int, d: int, c: LOTConfig) -> Cost:
    if c.window is not None:
        flops += window_cost(c.window.size, c.window.kind, n, d)
        moved += 8.0 * n * d * c.window.size
    return Cost(flops=flops, bytes=moved)


ENTRY = Entry(
    name="lot",
    build=LOT,
    summary="Two entropic transport plans glued at a learned pivot measure.",
    citation="Shahbazi et al. 2026, LOTFormer: Doubly-Stochastic Linear Attention via Low-Rank Optimal Transport",
    cost=cost,
    time="n",
    doubly_stochastic="converged",
)
