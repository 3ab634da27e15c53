"""ESPFormer: the expected sliced transport plan between queries and keys, by soft or hard sorting."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .base import Cost, Entry
from .clean import CleanAttention
from .masking import count_real, shared_mask, zero_padding

# elements of one temporary: slices are worked off in groups of at most this size, and recomputed in the backward
GROUP_ELEMENTS = 1 << 24


class SlicedPlans(CleanAttention):
    """What soft and hard sorting share: `A = Σ_l w_l G_l`, `w = softmax_l(−temperature · ⟨C, G_l⟩ / N)`.

    Slices are the D coordinate axes of `x = D^-1/2 q` and `y = D^-1/2 k`, C holds the distances `|x_i − y_j|`, and
    `G_l` matches sorted queries with sorted keys. Both belong to the same tokens, so that either mask speaks for both.

    Args:
        temperature: inverse temperature of the slices' weights; 0 is their mean.
    """

    def __init__(self, head_dim: int, num_heads: int, *, temperature: float = 0.1) -> None:
        super().__init__(head_dim, num_heads)
        if temperature < 0:
            raise ValueError(f"temperature must be at least 0, got {temperature}.")
        self.temperature = temperature

    def why_equal_lengths(self) -> str | None:
        return "sorted queries are matched with sorted keys one to one"

    def _weights(self, costs: Tensor) -> Tensor:
        """Weights of the slices from their costs per unit of mass, `(B, H, D)`."""
        return (-self.temperature * costs).softmax(-1)


class ESPFormer(SlicedPlans):
    """Soft sorting: `G_l = Pᵀ_x,l P_y,l` with `P_x[m, i] = softmax_i(−(sort(x)_m − x_i)² / tau)`, sorted downwards.

    Approaches the hard, doubly stochastic version as `tau → 0`. Groups of slices are applied to the values one
    after the other, so that memory stays near two n×n matrices a group instead of D of them.

    Args:
        tau: temperature of the sort. temperature: inverse temperature of the slices' weights; 0 is their mean and
            spares the n³ products that the costs of soft plans take.
    """

    def __init__(self, head_dim: int, num_heads: int, *, tau: float = 1e-3, temperature: float = 0.1) -> None:
        super().__init__(head_dim, num_heads, temperature=temperature)
        if not tau > 0:
            raise ValueError(f"tau must be above 0, got {tau}.")
        self.tau = tau

    def mix(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        grid: tuple[int, int] | None,
    ) -> Tensor:
        mask = shared_mask(key_mask, query_mask)
        q, k, v = zero_padding(q, mask), zero_padding(k, mask), zero_padding(v, mask)
        batch, heads, length, dim = q.shape
        x, y = q * dim**-0.5, k * dim**-0.5
        # not by the expansion of the square, which is wrong where it matters: at small distances
        exact = "donot_use_mm_for_euclid_dist"
        distances = torch.cdist(x, y, compute_mode=exact) if self.temperature > 0 else None
        group = max(1, GROUP_ELEMENTS // max(1, batch * heads * length * length))
        mixed, costs = [], []
        for x_group, y_group in zip(x.mT.split(group, 2), y.mT.split(group, 2), strict=True):
            run: Callable[..., tuple[Tensor, Tensor]] = self._slices
            if torch.is_grad_enabled() and group < dim:
                out, cost = checkpoint(run, x_group, y_group, v, distances, mask, use_reentrant=False)
            else:
                out, cost = run(x_group, y_group, v, distances, mask)
            mixed.append(out)
            costs.append(cost)
        weights = self._weights(torch.cat(costs, 2) / count_real(q, mask)[..., 0])
        return (torch.cat(mixed, 2) * weights[..., None, None]).sum(2)

    def _slices(
        self,
        x: Tensor,
        y: Tensor,
        v: Tensor,
        distances: Tensor | None,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """`G_l v (B, H, L, N, Dv)` and `⟨C, G_l⟩ (B, H, L)` for a group of slices `(B, H, L, N)`."""
        sort_x, sort_y = self._soft_sort(x, mask), self._soft_sort(y, mask)
        mixed = sort_x.mT @ _all_slices(sort_y, v)
        if distances is None:
            return mixed, mixed.new_zeros(mixed.shape[:3])
        return mixed, (_all_slices(sort_x, distances) * sort_y).sum((-1, -2))

    def _soft_sort(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Soft permutations `(B, H, L, N, N)` of `x (B, H, L, N)`: real tokens first, no row or column for padding."""
        if mask is None:
            ordered = x.sort(-1, descending=True).values
            return (-(ordered[..., :, None] - x[..., None, :]).square() / self.tau).softmax(-1)
        padding = ~mask[:, None, None]
        places = torch.arange(x.shape[-1], device=x.device)
        in_use = (places < mask.sum(-1, keepdim=True))[:, None, None]
        ordered = x.masked_fill(padding, -torch.inf).sort(-1, descending=True).values.masked_fill(~in_use, 0.0)
        scores = -(ordered[..., :, None] - x[..., None, :]).square() / self.tau
        soft = scores.masked_fill(padding[..., None, :], torch.finfo(x.dtype).min).softmax(-1)
        return soft * in_use[..., None]


def _all_slices(permutations: Tensor, x: Tensor) -> Tensor:
    """`P_l x` for every slice as one product, since broadcasting x would copy it for each."""
    return (permutations.flatten(2, 3) @ x).unflatten(2, permutations.shape[2:4])


def cost(n: int, d: int, *, temperature: float = 0.1, **_: object) -> Cost:
    """D pairs of soft permutations, applied to the values, and their n³ costs if those weigh the slices."""
    plans = d * (12.0 * n * n + 4.0 * n * n * d)
    costs = 2.0 * d * float(n) ** 3 if temperature > 0 else 0.0
    return Cost(flops=plans + costs, bytes=16.0 * n * d + 4.0 * n * d * d + 12.0 * n * n)


ENTRY = Entry(
    name="espformer",
    build=ESPFormer,
    summary="Expected sliced transport plan, sorted softly.",
    citation="Shahbazi et al. 2025, ESPFormer: Doubly-Stochastic Attention with Expected Sliced Transport Plans",
    cost=cost,
    needs_equal_lengths=True,
)
