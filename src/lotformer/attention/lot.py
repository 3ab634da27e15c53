"""LOT attention as a mechanism: the operator with its learned pivots, masses and ε."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..nn.depthwise import DepthwiseMixing
from ..nn.key_masses import KeyMasses, masses_of, mean_of_real
from ..nn.near_keys import NearKeys, window_cost
from ..nn.pivot_pooling import PivotPooling
from ..nn.pivots import PivotMeasure
from ..nn.prefix import DEFAULT_POWERS, PrefixRows
from ..nn.softmax import fused_softmax
from ..nn.undecayed import Undecayed
from ..ops import Coupling, coupling, lot_attention, lot_attention_from_scores
from ..ops.attention import drop_keys
from ..ops.precision import no_autocast
from ..ops.problem import Balance
from .base import Attention, Cost, Entry
from .config import OPTIONS, LOTConfig, Sinkhorn
from .masking import zero_padding
from .options import documents
from .unformed import Linear, Projections, Read, Reads, at_once, products_by_head

if TYPE_CHECKING:
    from typing_extensions import Self


@documents(OPTIONS)
class LOT(Attention):
    """Doubly stochastic, linear-time attention through a learned pivot measure.

    Args:
        config: every option as one `LOTConfig`, in place of the others.
        {options}
    """

    def __init__(self, head_dim: int, num_heads: int, config: LOTConfig | None = None, **options: Any) -> None:
        super().__init__(head_dim, num_heads)
        self.config = config = LOTConfig.of(config, options)
        pivots, prefix, local_conv, window = config.pivots, config.prefix, config.local_conv, config.window
        self.pivots = PivotMeasure(
            num_heads,
            config.rank,
            head_dim,
            learn_masses=pivots.learn_masses,
            mass_temperature=pivots.mass_temperature,
            init=pivots.init,
            unit=config.eps * (1.0 if config.scale is None else head_dim**-0.5 / abs(config.scale)),
        )
        aware = pivots.kind == "input-aware"
        self.pooling = PivotPooling(num_heads, config.rank, head_dim, pull=config.eps) if aware else None
        self.log_eps = Undecayed(num_heads) if config.learn_eps else None
        self.key_masses = KeyMasses(num_heads, head_dim, config.key_masses)
        self.prefix_tokens = config.prefix_tokens
        self.prefix = (
            None
            if prefix is None
            else PrefixRows(prefix.beta, polarize=prefix.polarize, powers=prefix.powers or DEFAULT_POWERS)
        )
        self.local = None
        if local_conv is not None:
            filters = head_dim if local_conv.sharing == "heads" else num_heads * head_dim
            self.local = DepthwiseMixing(filters, local_conv.kind, local_conv.size, sharing=local_conv.sharing)
        self.near = None if window is None else NearKeys(num_heads, head_dim, window.kind, window.size)
        self.reset_parameters()

    def extra_repr(self) -> str:
        return repr(self.config)

    def reset_parameters(self) -> None:
        """Start ε where it was told to; the parts start themselves."""
        if self.log_eps is not None:
            nn.init.constant_(self.log_eps.bias, math.log(self.config.eps))

    @property
    def eps(self) -> float | Tensor:
        """The regularisation in force: the constructor's, or the learned one per head."""
        return self.config.eps if self.log_eps is None else self.log_eps.bias.exp()

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
        self._require_self_attention(q, k)
        body = self._body
        body_key_mask, body_query_mask = self._body_mask(key_mask), self._body_mask(query_mask)
        read = self._dropped(v)
        if self._is_read_whole(q, grid):
            out = zero_padding(_softmax(body(q), k, read, key_mask), body_query_mask)
            return self._joined(self._rows(q, k, read, key_mask, query_mask), out, v, key_mask, query_mask, grid)
        points, log_masses = self.pivots(k)
        near, share = self._near(q, k, read, key_mask, query_mask, grid)
        if self.pooling is not None:
            points = points + self.pooling(body(k), body_key_mask)
        out = lot_attention(
            body(q),
            body(k),
            body(read),
            points,
            log_masses,
            **self._how_to_solve(),
            scale=self.config.scale,
            query_mask=body_query_mask,
            key_mask=body_key_mask,
            query_masses=_left_over(share, body_query_mask),
            key_masses=self.key_masses(body(q), body(k), body_key_mask, body_query_mask, backend=self.config.backend),
            backend=self.config.backend,
        )
        if near is not None and share is not None:
            out = out.lerp(near.to(out.dtype), share[..., None].to(out.dtype))
            if torch.is_grad_enabled():  # both are zero at padding, but what comes back there may be anything
                out = zero_padding(out, body_query_mask)
        return self._joined(self._rows(q, k, read, key_mask, query_mask), out, v, key_mask, query_mask, grid)

    def _dropped(self, v: Tensor) -> Tensor:
        """The values that rows read: the same keys are dropped for the prefix, the window and what is transported."""
        return drop_keys(v, self.config.dropout) if self.training and self.config.dropout > 0 else v

    def _is_read_whole(self, q: Tensor, grid: tuple[int, int] | None) -> bool:
        """Whether nothing is left to transport, so that fused softmax gives the same for less.

        Not while learning, where parameters without a gradient would surprise whoever averages gradients over
        processes, nor for an exported model, whose length may not be known.
        """
        if self.near is None or torch.is_grad_enabled() or torch.compiler.is_exporting():
            return False
        return self.near.sees_all(q.shape[2] - self.prefix_tokens, grid)

    def _rows(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, query_mask: Tensor | None
    ) -> Tensor | None:
        """The rows of the prefix."""
        if self.prefix is None:
            return None
        head = zero_padding(q[:, :, : self.prefix_tokens], self._prefix_mask(query_mask))
        return self.prefix(head, k, v, key_mask, backend=self.config.backend)

    def why_formed(self) -> str | None:
        """Why this instance needs its queries and keys formed, or None if it can read them off the layer's input."""
        if self.near is not None:
            return "a window compares queries with keys"
        return None if self.pooling is None else "input-aware pivots are pooled from the keys"

    def is_cheaper_unformed(self, width: int, tokens: int | None) -> bool:
        """Whether `attend_unformed` takes fewer multiplications for so many tokens of C channels; None: very many.

        Per head and token, q, k and their products with the pivots take 2·C·D + 2·D·R; from the input they take C·R a
        side, unless keys are formed. Making the weights of the scores takes as much as D tokens do.
        """
        d, r = self.head_dim, self.pivots.rank
        forms_keys = self._forms_keys
        sides = 1 if forms_keys else 2
        others = 0 if forms_keys else self.prefix_tokens + (self.key_masses.kind != "uniform")
        saved = sides * (width * d + d * r - width * r) - others * (width - d)
        return saved > 0 if tokens is None else tokens * saved > sides * r * d * width

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
        """What `forward` makes of the queries, keys and values that a layer would form of its input `x (B, N, C)`.

        The same to rounding, with gradients for the projections; `why_formed` says whether it can be had.
        """
        return self._attend_reads(x, self._reads(projections, x), values, key_mask, query_mask, grid)

    @property
    def _forms_keys(self) -> bool:
        """Whether keys are formed after all: polarised scores are not linear in them."""
        return self.prefix is not None and self.prefix.polarize

    def _scaled_points(self, like: Tensor) -> Tensor:
        """What queries and keys are multiplied by to get their scores."""
        points = self.pivots.points(like)
        return points * (self.head_dim**-0.5 if self.config.scale is None else self.config.scale)

    def _reads(self, projections: Projections, like: Tensor) -> Reads:
        points = self._scaled_points(like)
        queries, keys = projections.sides()
        scores = tuple(side.against(points) for side in ((queries,) if self._forms_keys else (queries, keys)))
        masses = None
        if self.key_masses.kind == "linear":
            masses = keys.seen_by(self.key_masses.directions(like, None)[:, :, None])[0]
        if self.prefix is None and self.key_masses.kind != "query-aware":
            return Reads(scores, masses, None, None, self._forms_keys)
        return Reads(scores, masses, queries, keys, self._forms_keys)

    def _attend_reads(
        self,
        x: Tensor,
        reads: Reads,
        values: Tensor | Linear,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        grid: tuple[int, int] | None,
    ) -> Tensor:
        """The output for values `(B, H, N, D)`, or for those that a map makes of the input."""
        self._require_prefix(x.shape[1])
        body = self._body
        read = self._read(x, reads, key_mask, query_mask, None if isinstance(values, Tensor) else values)
        v = values if isinstance(values, Tensor) else read.values
        assert v is not None
        kept = self._dropped(v)
        out = lot_attention_from_scores(
            body(read.query_scores),
            body(read.key_scores),
            body(kept),
            self.pivots.log_masses(v),
            **self._how_to_solve(),
            query_mask=self._body_mask(query_mask),
            key_mask=self._body_mask(key_mask),
            key_masses=read.key_masses,
            backend=self.config.backend,
        )
        rows = None
        if self.prefix is not None:
            assert reads.queries is not None
            assert reads.keys is not None
            head = reads.queries.formed(x[:, : self.prefix_tokens]).transpose(1, 2)
            head = zero_padding(head, self._prefix_mask(query_mask))
            if read.keys is not None:
                rows = self.prefix(head, read.keys, kept, key_mask, backend=self.config.backend)
            else:
                seen = reads.keys.seen_by(head * self.prefix.temperature(self.head_dim))
                scores = (seen @ x.mT).unflatten(1, head.shape[1:3])
                rows = self.prefix.pool(scores, zero_padding(kept, key_mask), key_mask)
        return self._joined(rows, out, v, key_mask, query_mask, grid)

    def _read(
        self,
        x: Tensor,
        reads: Reads,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        values: Linear | None = None,
    ) -> Read:
        """Everything about all tokens by one product, where that pays; masses are those of keys after the prefix."""
        heads, rank, width = self.num_heads, self.pivots.rank, self.head_dim
        maps = list(reads.scores)
        if reads.forms_keys:
            assert reads.keys is not None
            maps.append(reads.keys.map)
        if values is not None:
            maps.append(values)
        found = at_once(x, maps)
        count = len(reads.scores)
        scores = [side.transpose(1, 2) for y in found[:count] for side in y.unflatten(-1, (-1, heads, rank)).unbind(2)]
        formed = [y.unflatten(-1, (heads, width)).transpose(1, 2) for y in found[count:]]
        v = None if values is None else formed[-1]
        k = None
        if reads.forms_keys:
            k = formed[0]
            scores.append(products_by_head(k, self._scaled_points(k)))
        return Read(scores[0], scores[1], self._read_masses(x, reads, key_mask, query_mask), k, v)

    def _read_masses(
        self, x: Tensor, reads: Reads, key_mask: Tensor | None, query_mask: Tensor | None
    ) -> Tensor | None:
        if self.key_masses.kind == "uniform":
            return None
        key_mask, query_mask = self._body_mask(key_mask), self._body_mask(query_mask)
        rest = x[:, self.prefix_tokens :]
        if reads.masses is not None:
            return masses_of(F.linear(rest, reads.masses).mT, key_mask)
        assert reads.queries is not None
        assert reads.keys is not None
        mean_query = None
        if self.key_masses.kind == "query-aware":
            mean_query = reads.queries.formed(mean_of_real(rest[:, None], query_mask)[:, 0])
        direction = self.key_masses.directions(x, mean_query)
        return masses_of(reads.keys.seen_by(direction[:, :, None]) @ rest.mT, key_mask)

    def _joined(
        self,
        rows: Tensor | None,
        out: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        grid: tuple[int, int] | None,
    ) -> Tensor:
        """What the coupled tokens receive with local mixing added, behind the rows of the prefix."""
        if self.local is not None:
            return self.local.joined(rows, out, v, key_mask, query_mask, grid, backend=self.config.backend)
        if rows is None:
            return out
        rows = zero_padding(rows, self._prefix_mask(query_mask))
        # token by token in memory, as the layer reads it next: one copy instead of two
        return torch.cat([rows.transpose(1, 2), out.transpose(1, 2)], 1).transpose(1, 2)

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
        the plan is not used.
        """
        self._check(q, k, k, key_mask, query_mask)
        self._require_self_attention(q, k)
        _, share = self._near(q, k, None, key_mask, query_mask, grid)
        q, k = self._body(q), self._body(k)
        key_mask, query_mask = self._body_mask(key_mask), self._body_mask(query_mask)
        points, log_masses = self.pivots(k)
        return coupling(
            q,
            k,
            points if self.pooling is None else points + self.pooling(k, key_mask),
            log_masses,
            **self._how_to_solve(),
            scale=self.config.scale,
            query_mask=query_mask,
            key_mask=key_mask,
            query_masses=_left_over(share, query_mask),
            key_masses=self.key_masses(q, k, key_mask, query_mask, backend=self.config.backend),
            backend=self.config.backend,
        )

    def is_softmax(self, tokens: int, grid: tuple[int, int] | None = None) -> bool:
        """Whether it does what softmax does to a sequence this long: every token has all keys in its window."""
        if self.near is None or self.local is not None or not self.near.sees_all(tokens - self.prefix_tokens, grid):
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

    def _near(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        grid: tuple[int, int] | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """What the tokens after the prefix read by softmax, and the share of their rows that it is."""
        if self.near is None or q.shape[2] == self.prefix_tokens:
            return None, None
        near: tuple[Tensor | None, Tensor] = self.near(
            self._body(q), k, v, key_mask, grid, self._body_mask(query_mask), backend=self.config.backend
        )
        return near

    def _require_self_attention(self, q: Tensor, k: Tensor) -> None:
        parts = {"prefix tokens": self.prefix, "local mixing": self.local, "a window": self.near}
        needy = [name for name, part in parts.items() if part is not None]
        if needy and q.shape[2] != k.shape[2]:
            raise ValueError(
                f"{' and '.join(needy)}: self-attention only, got {q.shape[2]} queries and {k.shape[2]} keys."
            )
        self._require_prefix(q.shape[2])

    def _body(self, x: Tensor) -> Tensor:
        return x[:, :, self.prefix_tokens :] if self.prefix_tokens else x

    def _body_mask(self, mask: Tensor | None) -> Tensor | None:
        return mask[:, self.prefix_tokens :] if mask is not None and self.prefix_tokens else mask

    def _prefix_mask(self, mask: Tensor | None) -> Tensor | None:
        return None if mask is None else mask[:, : self.prefix_tokens]

    def _require_prefix(self, length: int) -> None:
        if length < self.prefix_tokens:
            raise ValueError(f"prefix_tokens={self.prefix_tokens}, but the sequence has {length} tokens.")

    def _how_to_solve(self) -> dict[str, Any]:
        return {
            "eps": self.eps,
            "balance": self.config.balance,
            **self.config.solver.arguments(),
        }


def _softmax(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    """Softmax attention over the real keys, in the precision of the queries under autocast, too."""
    allowed = None if key_mask is None else key_mask[:, None, None]
    k, v = (zero_padding(x, key_mask).to(q.dtype) for x in (k, v))
    with no_autocast(q.device.type):
        return fused_softmax(q, k, v, allowed)


def _left_over(share: Tensor | None, query_mask: Tensor | None) -> Tensor | None:
    """Masses of the queries of which near keys take this share: they have that much less to send."""
    if share is None:
        return None
    left = (1 - share).clamp_min(1e-6)
    if query_mask is not None:
        left = left.masked_fill(~query_mask[:, None], 0.0)
    return left / left.sum(-1, keepdim=True).clamp_min(1e-30)


_SOLVED_SIDES: dict[Balance, int] = {"both": 2, "keys": 1, "none": 0}


def cost(n: int, d: int, config: LOTConfig | None = None, **options: Any) -> Cost:
    """Four n·r·d products and T sweeps over the n·r kernel of each solved side; the fused kernel moves q, k, v and out
    once.

    An exact solve counts as the default number of sweeps. Input-aware pivots add two products, a window two with the
    candidates of a token.
    """
    c = LOTConfig.of(config, options)
    sweeps = c.solver.sweeps if isinstance(c.solver, Sinkhorn) else Sinkhorn().sweeps
    flops, moved = 8.0 * n * c.rank * d + 4.0 * _SOLVED_SIDES[c.balance] * sweeps * n * c.rank, 16.0 * n * d
    if c.pivots.kind != "fixed":
        flops, moved = flops + 4.0 * n * c.rank * d, moved + 8.0 * n * d
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
