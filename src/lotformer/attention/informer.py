"""Informer's ProbSparse attention: softmax for the few queries that look most selective, the mean for the rest."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..nn.checks import require_count
from ..nn.softmax import fused_softmax
from .base import Attention, Cost, Entry
from .blocks import into_blocks
from .inputs import Inputs

_LONGEST = 2**24
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
_SHARING = 64  # neighbouring queries that are scored on the same sample of keys


class Informer(Attention):
    """The `factor · ⌈ln N⌉` queries with the largest `max_j s_ij - mean_j s_ij` attend by softmax, `s = q kᵀ D^-1/2`.

    The measure is estimated on a sample of `factor · ⌈ln M⌉` keys; the other queries get the mean of the real values.
    Lengths count real tokens. The sample is a randomly shifted Weyl sequence, drawn once from `seed`, so that the
    result does not change from call to call, and 64 neighbouring queries share one, so that it is a product of
    matrices (the public code draws anew for each query and call, and divides the sampled sum by M instead of the
    size of the sample).
    """

    shifts: Tensor

    def __init__(self, head_dim: int, num_heads: int, *, factor: int = 5, seed: int = 0) -> None:
        super().__init__(head_dim, num_heads)
        require_count("factor", factor)
        self.factor = factor
        most = factor * math.ceil(math.log(_LONGEST))
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("shifts", torch.rand(most, dtype=torch.float64, generator=generator))

    def attend(self, inputs: Inputs) -> Tensor:
        q, k, v, key_mask, query_mask, *_ = inputs.cleaned()
        n, width = q.shape[2:]
        queries, keys = self._real(q, query_mask), self._real(k, key_mask)
        active = min(self._budget(n), n)
        order = self._selectivity(q.detach(), k.detach(), key_mask, query_mask, keys).topk(active, -1).indices

        chosen = torch.gather(q, 2, order[..., None].expand(-1, -1, -1, width))
        attended = fused_softmax(chosen, k, v, inputs.allowed).to(q.dtype)
        total = v.sum(2, keepdim=True, dtype=torch.promote_types(v.dtype, torch.float32))
        mean = (total / keys.clamp_min(1)[:, None, None, None]).to(q.dtype)
        # a padded sample is entitled to fewer rows of softmax than the padded length
        entitled = torch.arange(active, device=q.device) < self._budgets(queries)[:, None]
        attended = torch.where(entitled[:, None, :, None], attended, mean)
        out = mean.expand(-1, -1, n, -1).scatter(2, order[..., None].expand_as(attended), attended)
        return inputs.finished(out)

    @torch.no_grad()
    def _selectivity(
        self, q: Tensor, k: Tensor, key_mask: Tensor | None, query_mask: Tensor | None, keys: Tensor
    ) -> Tensor:
        """The estimate of `max - mean` of every query's scores, `(B, H, N)`; -inf on padding."""
        n = q.shape[2]
        samples = min(self._budget(k.shape[2]), k.shape[2])
        counted = torch.arange(samples, device=q.device) < self._budgets(keys)[:, None]
        counted = counted[:, None, None, :]
        blocks = -(-n // _SHARING)
        index = torch.arange(blocks, device=q.device, dtype=torch.float64)
        fraction = torch.frac(self.shifts[:samples] + _GOLDEN * index[:, None])
        sampled = (fraction * keys[:, None, None]).long().flatten(1)
        if key_mask is not None:  # the place among the real keys, as a position
            sampled = torch.sort(~key_mask, dim=-1, stable=True).indices.gather(1, sampled)
        sampled = sampled[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[3])
        dtype = torch.promote_types(q.dtype, torch.float32)
        near = k.gather(2, sampled).unflatten(2, (blocks, samples)).to(dtype)
        scores = (into_blocks(q, _SHARING).to(dtype) @ near.mT).flatten(2, 3)[:, :, :n]
        highest = scores.masked_fill(~counted, -torch.inf).amax(-1)
        total = scores.masked_fill(~counted, 0.0).sum(-1)
        measure = highest - total / counted.sum(-1).clamp_min(1)
        measure = measure.nan_to_num(neginf=-torch.finfo(dtype).max)
        return measure if query_mask is None else measure.masked_fill(~query_mask[:, None], -torch.inf)

    def _budget(self, length: int) -> int:
        return self.factor * math.ceil(math.log(length)) if length > 1 else self.factor

    def _budgets(self, lengths: Tensor) -> Tensor:
        """`factor · ⌈ln length⌉` of every sample, at least `factor`, at most its length."""
        steps = torch.exp(torch.arange(math.ceil(math.log(_LONGEST)), device=lengths.device, dtype=torch.float64))
        logs = (lengths[:, None] > steps).sum(-1).clamp_min(1)
        return torch.minimum(self.factor * logs, lengths)

    def _real(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Number of real tokens of every sample `(B,)`."""
        if mask is None:
            return torch.full((x.shape[0],), x.shape[2], device=x.device)
        return mask.sum(-1)


def cost(n: int, d: int, *, factor: int = 5, **_: object) -> Cost:
    """Sampled scores for every query and full rows for the active ones."""
    active = min(factor * math.ceil(math.log(max(n, 2))), n)
    return Cost(flops=2.0 * n * active * d + 4.0 * n * active * d, bytes=16.0 * n * d + 8.0 * n * active)


ENTRY = Entry(
    name="informer",
    build=Informer,
    summary="ProbSparse: softmax for the most selective queries, the mean for the rest.",
    citation="Zhou et al. 2021, Informer: Beyond Efficient Transformer for Long Sequence Time-Series Forecasting",
    cost=cost,
    time="n log n",
)
