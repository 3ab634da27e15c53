"""ESPFormer with true sorting: a mixture of permutations, doubly stochastic without iterating."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.linalg import vector_norm

from .base import Cost, Entry
from .espformer import GROUP_ELEMENTS, SlicedPlans, shared_masks
from .masking import count_real, zero_padding


class HardESPFormer(SlicedPlans):
    """`G_l` is the permutation that sends the m-th largest query of axis l to its m-th largest key.

    The limit of `ESPFormer` for `tau → 0`: exactly doubly stochastic, and never formed, since a permutation applied
    to the values is a look-up. Sorting has no slope: queries and keys learn through the weights of the slices alone,
    and not at all with `temperature=0`.
    """

    def mix(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        grid: tuple[int, int] | None,
    ) -> Tensor:
        query_mask, key_mask = shared_masks(query_mask, key_mask)
        q, k, v = zero_padding(q, query_mask), zero_padding(k, key_mask), zero_padding(v, key_mask)
        batch, heads, length, dim = q.shape
        partners = _partners(q, k, query_mask, key_mask)
        group = max(1, GROUP_ELEMENTS // (batch * heads * length * dim))
        if self.temperature > 0:
            x, y = q * dim**-0.5, k * dim**-0.5
            costs = [self._costs(x, y, slices, query_mask) for slices in partners.split(group, 2)]
            weights = self._weights(torch.cat(costs, 2))
        else:
            weights = q.new_full((batch, heads, dim), 1 / dim)
        out = torch.zeros_like(v)
        for slices, weight in zip(partners.split(group, 2), weights.split(group, 2), strict=True):
            out = out + (_look_up(v, slices) * weight[..., None, None]).sum(2)
        return out

    def _costs(self, x: Tensor, y: Tensor, partners: Tensor, query_mask: Tensor | None) -> Tensor:
        """Mean distance `(B, H, L)` of the real queries from their partners."""
        distances = vector_norm(x[:, :, None] - _look_up(y, partners), dim=-1)
        if query_mask is not None:
            distances = distances.masked_fill(~query_mask[:, None, None], 0.0)
        return distances.sum(-1) / count_real(x, query_mask)[..., 0]


@torch.no_grad()
def _partners(q: Tensor, k: Tensor, query_mask: Tensor | None, key_mask: Tensor | None) -> Tensor:
    """The key that each query is matched with on each axis, `(B, H, D, N)` integers."""
    by_query, by_key = _order(q, query_mask), _order(k, key_mask)
    return torch.empty_like(by_key).scatter_(-1, by_query, by_key)


def _order(x: Tensor, mask: Tensor | None) -> Tensor:
    """Tokens from the largest to the smallest coordinate, `(B, H, D, N)`; padding comes last."""
    coordinates = x.mT if mask is None else x.mT.masked_fill(~mask[:, None, None], -torch.inf)
    return coordinates.argsort(dim=-1, descending=True, stable=True)


def _look_up(x: Tensor, index: Tensor) -> Tensor:
    """Tokens of `x (B, H, N, D)` at `index (B, H, L, N)`: `(B, H, L, N, D)`."""
    flat = index.flatten(2)[..., None].expand(-1, -1, -1, x.shape[-1])
    return x.gather(2, flat).unflatten(2, index.shape[2:])


def cost(n: int, d: int, *, temperature: float = 0.1, **_: object) -> Cost:
    """D sorts on both sides, D look-ups of the values, and D of the keys for the costs of the slices."""
    sorts = 2.0 * d * n * max(1, n - 1).bit_length()
    look_ups = 2.0 * n * d * d + (3.0 * n * d * d if temperature > 0 else 0.0)
    return Cost(flops=sorts + look_ups, bytes=16.0 * n * d + 12.0 * n * d * d)


ENTRY = Entry(
    name="espformer-hard",
    build=HardESPFormer,
    summary="Expected sliced transport plan by true sorting, n log n.",
    citation="Shahbazi et al. 2025, ESPFormer: Doubly-Stochastic Attention with Expected Sliced Transport Plans",
    cost=cost,
    linear=True,
    doubly_stochastic=True,
    needs_equal_lengths=True,
)
