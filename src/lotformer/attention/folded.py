"""LOT for inference: the weights that make queries and keys are folded into those that make their scores."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from ..nn.padding import zero_padding_to_learn
from ..ops.precision import no_autocast
from .inputs import Inputs
from .lot import LOT
from .lot_scores import ScoreSides, forms_keys, reads_of
from .lot_sides import Sides
from .masking import either_mask
from .unformed import Linear, Projections, Reads, Side


class FoldedLOT(LOT):
    """The form of `LOT` that `lotformer.fold` installs: the same function, of the input of the layer.

    Queries and keys are not formed any more. In their place `forward` and `coupling` take the tokens themselves,
    `x (B, N, C)` cut into pieces as wide as a head, `(B, C / D, N, D)`, twice: that is what a host hands over whose
    query and key projections are identities.

    It owns the maps of `Reads`: `scores`; `masses` for key masses that are linear in the keys; `query_key`, the
    projections, where one vector per sample is read through them (query-aware masses, rows of a prefix).
    """

    scores: nn.Linear
    masses: nn.Linear | None
    query_key: nn.Linear | None

    @classmethod
    @torch.no_grad()
    def of(cls, mechanism: LOT, projections: Projections) -> FoldedLOT:
        """The folded form of a mechanism in a layer with these projections; the mechanism stays as it is.

        Raises:
            ValueError: it needs its queries and keys.
        """
        reason = why_unfoldable(mechanism)
        if reason is not None:
            raise ValueError(f"this attention cannot be folded: {reason}.")
        reads = reads_of(mechanism, projections, projections.weight)
        made = copy.deepcopy(mechanism)
        made.__class__ = cls
        assert isinstance(made, cls)
        biases = [bias for _, bias in reads.scores if bias is not None]
        made.scores = _linear(torch.cat([weight for weight, _ in reads.scores]), torch.cat(biases) if biases else None)
        made.masses = None if reads.masses is None else _linear(reads.masses, None)
        kept = None if reads.queries is None else projections
        made.query_key = None if kept is None else _linear(kept.weight.flatten(0, 2), _flat(kept.bias))
        if not reads.forms_keys:
            made.pivots.points = None  # type: ignore[assignment]  # they are in the scores
        if made.masses is not None:
            made.key_masses.direction = None
        return made

    def attend(self, inputs: Inputs) -> Tensor:
        q, _, v, key_mask, query_mask, grid = inputs
        dtype = self._precision
        with no_autocast(q.device.type):  # a score that was rounded is a wrong plan
            x = zero_padding_to_learn(_tokens(q).to(dtype), either_mask(key_mask, query_mask))
            out = self._attended(ScoreSides(self, self._stored(), x, v.to(dtype), key_mask, query_mask, grid))
        return out.to(v.dtype)

    def attend_input(
        self,
        x: Tensor,
        values: Linear,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        *,
        grid: tuple[int, int] | None = None,
    ) -> Tensor:
        """The same for a layer's input `x (B, N, C)` in its precision, and the map that makes values of it."""
        return self._attended(ScoreSides(self, self._stored(), x, values, key_mask, query_mask, grid))

    def why_formed(self) -> str | None:
        return "it is folded already"

    def _sides(self, inputs: Inputs) -> Sides:
        q, _, _, key_mask, query_mask, grid = inputs
        return ScoreSides(self, self._stored(), _tokens(q.to(self._precision)), None, key_mask, query_mask, grid)

    @property
    def _precision(self) -> torch.dtype:
        """The precision of the computation: at least fp32, also if the weights were rounded to less after folding."""
        return torch.promote_types(self.scores.weight.dtype, torch.float32)

    def _stored(self) -> Reads:
        sides: tuple[Side | None, Side | None] = (None, None)
        if self.query_key is not None:
            sides = Projections.of(*self._map(self.query_key), self.num_heads, self.head_dim).sides()
        masses = None if self.masses is None else self._map(self.masses).weight
        return Reads((self._map(self.scores),), masses, *sides, forms_keys(self))

    def _map(self, stored: nn.Linear) -> Linear:
        dtype = self._precision
        return Linear(stored.weight.to(dtype), None if stored.bias is None else stored.bias.to(dtype))

    def _check(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, query_mask: Tensor | None) -> None:
        width = self.scores.in_features
        if q.dim() != 4 or q.shape[1] * q.shape[3] != width or q.shape != k.shape or q.shape[2] != v.shape[2]:
            raise ValueError(
                f"folded attention takes the input of its layer, {width} channels cut into heads, for queries and "
                f"keys, got {tuple(q.shape)} and {tuple(k.shape)} for values {tuple(v.shape)}."
            )
        self._check_masks(q, k, key_mask, query_mask)


def why_unfoldable(mechanism: nn.Module) -> str | None:
    """The reason why a mechanism cannot be folded, or None if it can."""
    if isinstance(mechanism, LOT):
        return mechanism.why_formed()
    return f"{type(mechanism).__name__} is not LOT attention"


def split_tokens(x: Tensor, head_dim: int) -> Tensor:
    """`x (B, N, C)` as `(B, C / D, N, D)`, what `FoldedLOT` takes for queries and keys; a view."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def _tokens(q: Tensor) -> Tensor:
    return q.transpose(1, 2).flatten(2)


def _flat(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.flatten()


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
    return made
