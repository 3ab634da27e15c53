"""ESPFormer with true sorting: a mixture of permutations, doubly stochastic without iterating."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .base import Cost, Entry
from .espformer import GROUP_ELEMENTS, SlicedPlans
from .inputs import Inputs
from .masking import count_real, shared_mask, zero_padding


class HardESPFormer(SlicedPlans):
    """`G_l` is the permutation that sends the m-th largest query of axis l to its m-th largest key.

    The limit of `ESPFormer` for `tau → 0`: exactly doubly stochastic, and never formed, since a permutation applied
    to the values is a look-up. Sorting has no slope: queries and keys learn through the weights of the slices alone,
    and not at all with `temperature=0`.
    """

    def mix(self, inputs: Inputs) -> Tensor:
        q, k, v, key_mask, query_mask, *_ = inputs
        mask = shared_mask(key_mask, query_mask)
        q, k, v = zero_padding(q, mask), zero_padding(k, mask), zero_padding(v, mask)
        partners = _partners(q, k, mask)
        return _mean_of_partners(v, partners, self._slice_weights(q, k, partners, mask))

    def _slice_weights(self, q: Tensor, k: Tensor, partners: Tensor, mask: Tensor | None) -> Tensor:
        batch, heads, length, dim = q.shape
        if self.temperature == 0:
            return q.new_full((batch, heads, dim), 1 / dim)
        group = max(1, GROUP_ELEMENTS // (batch * heads * length * dim))
        # |x − y|² = |x|² + |y|² − 2 x·y: every permutation has the same squares, and the softmax drops them
        measure, factor = (_products, -2 / dim) if self.slice_cost == "squared" else (_distances, dim**-0.5)
        costs = []
        for slices in partners.split(group, 2):
            if torch.is_grad_enabled() and group < dim:
                costs.append(checkpoint(measure, q, k, slices, use_reentrant=False))
            else:
                costs.append(measure(q, k, slices))
        return self._weights(torch.cat(costs, 2) * factor, count_real(q, mask))


@torch.no_grad()
def _partners(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """The key that each query is matched with on each axis, `(B, H, D, N)` integers."""
    by_query, by_key = _order(q, mask), _order(k, mask)
    return torch.empty_like(by_key).scatter_(-1, by_query, by_key)


def _order(x: Tensor, mask: Tensor | None) -> Tensor:
    """Tokens from the largest to the smallest coordinate, `(B, H, D, N)`; padding comes last."""
    coordinates = x.mT if mask is None else x.mT.masked_fill(~mask[:, None, None], -torch.inf)
    return coordinates.argsort(dim=-1, descending=True, stable=True)


def _products(q: Tensor, k: Tensor, partners: Tensor) -> Tensor:
    """`Σ_i q_i · k_partner(i)` of every slice, `(B, H, L)`; padding is clean and meets padding."""
    partner = F.embedding(_flat(partners), k.flatten(0, 2))
    return (partner.flatten(3) @ q.flatten(2)[..., None]).squeeze(-1)


def _distances(q: Tensor, k: Tensor, partners: Tensor) -> Tensor:
    """`Σ_i |q_i − k_partner(i)|` of every slice, `(B, H, L)`; padding is zero and meets padding."""
    partner = F.embedding(_flat(partners), k.flatten(0, 2))
    return torch.linalg.vector_norm(q[:, :, None] - partner, dim=-1).sum(-1)


def _mean_of_partners(v: Tensor, partners: Tensor, weights: Tensor) -> Tensor:
    """`Σ_l w_l v[partner_l]`: each token is a bag of D rows of the values, never stored one by one."""
    batch, heads, slices, length = partners.shape
    bags = _flat(partners).transpose(2, 3).reshape(-1, slices)
    bag_weights = weights[:, :, None].expand(-1, -1, length, -1).reshape(-1, slices)
    mixed = F.embedding_bag(bags, v.flatten(0, 2), mode="sum", per_sample_weights=bag_weights)
    return mixed.unflatten(0, (batch, heads, length))


def _flat(partners: Tensor) -> Tensor:
    """Indices among the tokens of all samples and heads laid end to end."""
    batch, heads, _, length = partners.shape
    return partners + length * torch.arange(batch * heads, device=partners.device).view(batch, heads, 1, 1)


def cost(n: int, d: int, *, temperature: float | None = None, **_: object) -> Cost:
    """D sorts on both sides, D look-ups of the values, and D of the keys for the costs of the slices."""
    sorts = 2.0 * d * n * max(1, n - 1).bit_length()
    look_ups = 2.0 * n * d * d + (2.0 * n * d * d if temperature != 0 else 0.0)
    return Cost(flops=sorts + look_ups, bytes=16.0 * n * d + 8.0 * n * d * d)


ENTRY = Entry(
    name="espformer-hard",
    build=HardESPFormer,
    summary="Expected sliced transport plan by true sorting.",
    citation="Shahbazi et al. 2025, ESPFormer: Doubly-Stochastic Attention with Expected Sliced Transport Plans",
    cost=cost,
    time="n log n",
    doubly_stochastic="exact",
    needs_equal_lengths=True,
)
