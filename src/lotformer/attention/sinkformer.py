"""Sinkformer: softmax attention carried on to a doubly stochastic matrix by Sinkhorn's iterations."""

from __future__ import annotations

import torch
from torch import Tensor

from ..nn.checks import require_count, require_moderate
from .base import Cost, Entry
from .clean import CleanAttention
from .inputs import Inputs
from .masking import count_real


class Sinkformer(CleanAttention):
    """`A = N Γ`, Γ the entropic plan of the scores `s = scale · q kᵀ / eps` after some half-steps of Sinkhorn.

        f_i = −LSE_j(s_ij + g_j + log b_j)      rows          a_i = 1/N, b_j = 1/M over the real tokens
        g_j = −LSE_i(s_ij + f_i + log a_i)      columns       A_ij = b_j exp(s_ij + f_i + g_j)

    One half-step is softmax attention; an odd number leaves rows that sum to exactly 1, an even one columns that
    sum to exactly N / M.

    Args:
        half_steps: normalisations in all, starting with the rows. eps: entropic regularisation.
        scale: factor of the scores, `D^-1/2` by default.
    """

    def __init__(
        self, head_dim: int, num_heads: int, *, half_steps: int = 3, eps: float = 1.0, scale: float | None = None
    ) -> None:
        super().__init__(head_dim, num_heads)
        require_count("half_steps", half_steps)
        require_moderate("eps", eps)
        if scale is not None:
            require_moderate("scale", scale, signed=True)
        self.half_steps = half_steps
        self.eps = eps
        self.scale = head_dim**-0.5 if scale is None else scale

    def mix(self, inputs: Inputs) -> Tensor:
        q, k, v, key_mask, query_mask, *_ = inputs
        scores = (q * (self.scale / self.eps)) @ k.mT
        log_a = _log_masses(q, query_mask)[..., None]
        log_b = _log_masses(k, key_mask)[..., None, :]
        g = torch.zeros_like(log_b)
        for _ in range((self.half_steps - 1) // 2):
            f = -torch.logsumexp(scores + (g + log_b), -1, keepdim=True)
            g = -torch.logsumexp(scores + (f + log_a), -2, keepdim=True)
        if self.half_steps % 2:
            return torch.softmax(scores + (g + log_b), -1) @ v
        f = -torch.logsumexp(scores + (g + log_b), -1, keepdim=True)
        columns = torch.softmax(scores + (f + log_a), -2)
        return columns @ v * (count_real(q, query_mask) / count_real(k, key_mask))


def _log_masses(x: Tensor, mask: Tensor | None) -> Tensor:
    """Logarithms of uniform masses `(B or 1, 1, N)`: -inf on padding, finite for a sample of padding alone."""
    log_mass = -count_real(x, mask)[..., 0].log()
    if mask is None:
        return log_mass.expand(1, 1, x.shape[2])
    padding = ~mask & mask.any(-1, keepdim=True)
    return log_mass.expand(-1, 1, x.shape[2]).masked_fill(padding[:, None], -torch.inf)


def cost(n: int, d: int, *, half_steps: int = 3, **_: object) -> Cost:
    """Two n·n·d products and an exponential pass over the n×n scores each half-step."""
    return Cost(flops=4.0 * n * n * d + 4.0 * half_steps * n * n, bytes=16.0 * n * d + 8.0 * n * n)


ENTRY = Entry(
    name="sinkformer",
    build=Sinkformer,
    summary="Sinkhorn's iterations on the n×n scores.",
    citation="Sander et al. 2022, Sinkformers: Transformers with Doubly Stochastic Attention",
    cost=cost,
    doubly_stochastic="converged",
)
