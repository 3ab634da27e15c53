"""ESPFormer: the expected sliced transport plan between queries and keys, by soft or hard sorting."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..nn.checks import require_moderate
from .base import Cost, Entry
from .clean import CleanAttention
from .inputs import Inputs
from .masking import count_real, shared_mask, zero_padding

# elements of one temporary: slices are worked off in groups of at most this size, and recomputed in the backward.
# Small enough to be used again by the allocator: fresh pages for larger ones cost more than the arithmetic.
GROUP_ELEMENTS = 1 << 21


SliceCost = Literal["squared", "distance"]


class SlicedPlans(CleanAttention):
    """The part shared by soft and hard sorting: `A = Σ_l w_l G_l`, `w = softmax_l(−temperature · ⟨C, G_l⟩ / N)`.

    Slices are the D coordinate axes of `x = D^-1/2 q` and `y = D^-1/2 k`, C holds the squared distances
    `|x_i − y_j|²`, and `G_l` matches sorted queries with sorted keys. Both belong to the same tokens, so that either
    mask speaks for both.

    Differences from public code: it takes `C = |x_i − y_j|` and sums over the tokens instead of averaging, which is
    `slice_cost="distance"`; for soft plans such costs do not factorise and take n³ operations per slice. Its classes
    have `temperature=10` and `0.1`, its scripts 0.

    Args:
        temperature: inverse temperature of the slices' weights; 0 is their mean. Near 0 the weights are all alike, and
            queries and keys hardly learn. None lets the weights of unrelated tokens differ by factors around e: the
            costs of such tokens deviate by about `2 (D·N)^-1/2` between slices (squared) or `⅔ (N/D)^1/2` (distance),
            measured for N from 32 to 197 and D from 16 to 64, and the temperature is the inverse of that.
        slice_cost: "squared", the mean over tokens of squared distances, or "distance", the sum of plain ones.
    """

    def __init__(
        self, head_dim: int, num_heads: int, *, temperature: float | None = None, slice_cost: SliceCost = "squared"
    ) -> None:
        super().__init__(head_dim, num_heads)
        if temperature is not None:
            require_moderate("temperature", temperature, least=0)
        if slice_cost not in get_args(SliceCost):
            raise ValueError(f"slice_cost must be 'squared' or 'distance', got {slice_cost!r}.")
        self.temperature = temperature
        self.slice_cost = slice_cost

    def why_equal_lengths(self) -> str | None:
        return "sorted queries are matched with sorted keys one to one"

    def _weights(self, costs: Tensor, tokens: Tensor) -> Tensor:
        """Weights of the slices `(B, H, D)` from their costs summed over tokens, and the number of `tokens`."""
        tokens = tokens[..., 0]
        if self.slice_cost == "squared":
            costs, usual = costs / tokens, 0.5 * (self.head_dim * tokens).sqrt()
        else:
            usual = 1.5 * (self.head_dim / tokens).sqrt()
        return (-(usual if self.temperature is None else self.temperature) * costs).softmax(-1)


class ESPFormer(SlicedPlans):
    """Soft sorting: `G_l = Pᵀ_x,l P_y,l` with `P_x[m, i] = softmax_i(−(sort(x)_m − x_i)² / tau)`, sorted downwards.

    Approaches the hard, doubly stochastic version as `tau → 0`. Groups of slices are applied to the values one
    after the other, so that memory stays near two n×n matrices per group instead of D of them.

    Args:
        tau: temperature of the sort. temperature, slice_cost: as in `SlicedPlans`.
    """

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        *,
        tau: float = 1e-3,
        temperature: float | None = None,
        slice_cost: SliceCost = "squared",
    ) -> None:
        super().__init__(head_dim, num_heads, temperature=temperature, slice_cost=slice_cost)
        require_moderate("tau", tau, least=1e-20)
        self.tau = tau

    def mix(self, inputs: Inputs) -> Tensor:
        q, k, v, key_mask, query_mask, *_ = inputs
        mask = shared_mask(key_mask, query_mask)
        q, k, v = zero_padding(q, mask), zero_padding(k, mask), zero_padding(v, mask)
        batch, heads, length, dim = q.shape
        x, y = q * dim**-0.5, k * dim**-0.5
        group = max(1, GROUP_ELEMENTS // max(1, batch * heads * length * length))
        mixed, costs = [], []
        x_axes, y_axes = x.mT.contiguous(), y.mT.contiguous()
        for x_group, y_group in zip(x_axes.split(group, 2), y_axes.split(group, 2), strict=True):
            if torch.is_grad_enabled() and group < dim:
                out, cost = checkpoint(self._slices, x_group, y_group, x, y, v, mask, use_reentrant=False)
            else:
                out, cost = self._slices(x_group, y_group, x, y, v, mask)
            mixed.append(out)
            costs.append(cost)
        weights = self._weights(torch.cat(costs, 2), count_real(q, mask))
        return (torch.cat(mixed, 2) * weights[..., None, None]).sum(2)

    def _slices(
        self,
        x_slices: Tensor,
        y_slices: Tensor,
        x: Tensor,
        y: Tensor,
        v: Tensor,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """`G_l v (B, H, L, N, Dv)` and `⟨C, G_l⟩ (B, H, L)` for a group of slices `(B, H, L, N)`.

        Rows of soft permutations sum to one, so that the cost falls apart into sums over the sorted places m,

            ⟨C, PᵀR⟩ = Σ_m (P |x|²)_m + (R |y|²)_m − 2 (P x)_m · (R y)_m

        which takes products of permutations with tokens and never one with another. Plain distances do not.
        """
        sort_x, sort_y = self._soft_sort(x_slices, mask), self._soft_sort(y_slices, mask)
        if self.temperature == 0:
            mixed = sort_x.mT @ _all_slices(sort_y, v)
            return mixed, mixed.new_zeros(mixed.shape[:3])
        if self.slice_cost == "distance":
            distances = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")
            return sort_x.mT @ _all_slices(sort_y, v), (_all_slices(sort_x, distances) * sort_y).sum((-2, -1))
        dim = x.shape[-1]
        sorted_x = _all_slices(sort_x, torch.cat([x, _square(x)], -1))
        sorted_y, sorted_v = _all_slices(sort_y, torch.cat([y, _square(y), v], -1)).split([dim + 1, v.shape[-1]], -1)
        squares = sorted_x[..., dim] + sorted_y[..., dim]
        products = (sorted_x[..., :dim] * sorted_y[..., :dim]).sum(-1)
        return sort_x.mT @ sorted_v, (squares - 2 * products).sum(-1)

    def _soft_sort(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Soft permutations `(B, H, L, N, N)` of `x (B, H, L, N)`: real tokens first, no row or column for padding."""
        x = x * self.tau**-0.5
        if mask is None:
            return _nearest(x.sort(-1, descending=True).values, x).softmax(-1)
        padding = ~mask[:, None, None]
        places = torch.arange(x.shape[-1], device=x.device)
        in_use = (places < mask.sum(-1, keepdim=True))[:, None, None]
        ordered = x.masked_fill(padding, -torch.inf).sort(-1, descending=True).values.masked_fill(~in_use, 0.0)
        scores = _nearest(ordered, x).masked_fill(padding[..., None, :], torch.finfo(x.dtype).min)
        return scores.softmax(-1) * in_use[..., None]


def _nearest(ordered: Tensor, x: Tensor) -> Tensor:
    """`−(ordered_m − x_i)²`, `(B, H, L, N, N)`, in two passes over memory: soft sorting spends its time on those."""
    difference = ordered[..., :, None] - x[..., None, :]
    return torch.addcmul(x.new_zeros(()), difference, difference, value=-1)


def _all_slices(permutations: Tensor, x: Tensor) -> Tensor:
    """`P_l x` for every slice as one product, since broadcasting x would copy it for each."""
    return (permutations.flatten(2, 3) @ x).unflatten(2, permutations.shape[2:4])


def _square(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True)


def cost(n: int, d: int, *, temperature: float | None = None, slice_cost: SliceCost = "squared", **_: object) -> Cost:
    """D pairs of soft permutations, applied to the values, and to queries and keys if costs weigh the slices."""
    plans = d * (12.0 * n * n + 4.0 * n * n * d)
    per_slice = 4.0 * n * n * (d + 1.0) if slice_cost == "squared" else 2.0 * n**3
    costs = d * per_slice if temperature != 0 else 0.0
    return Cost(flops=plans + costs, bytes=16.0 * n * d + 4.0 * n * d * d + 12.0 * n * n)


ENTRY = Entry(
    name="espformer",
    build=ESPFormer,
    summary="Expected sliced transport plan, sorted softly.",
    citation="Shahbazi et al. 2025, ESPFormer: Doubly-Stochastic Attention with Expected Sliced Transport Plans",
    cost=cost,
    needs_equal_lengths=True,
)
