"""Low-rank optimal transport between queries and keys, by mirror descent with Dykstra's projections."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..nn.checks import require_count, require_moderate
from ..ops.precision import no_autocast
from .base import Attention, Cost, Entry
from .inputs import Inputs
from .masking import zero_padding

_NO_MASS = -1e4  # of padding, in logarithm: exp gives zero in every precision, and nothing is infinite


class LowRankOT(Attention):
    """Attention by a coupling of rank r that is optimised, for these very queries and keys, from scratch.

        minimise ⟨C, Q diag(1/g) Rᵀ⟩ - ε H(Q, R, g)   over   Q 1 = a, R 1 = b, Qᵀ 1 = Rᵀ 1 = g,   C = -q kᵀ D^-1/2
        A = N · Q diag(1/g) Rᵀ

    `a` and `b` are uniform over the real tokens. Each of `outer_steps` of mirror descent multiplies (Q, R, g) by the
    exponential of minus `step` times the gradient over its largest entry, and projects back by `inner_steps`
    of Dykstra's algorithm in the log domain. Gradients go through all of them. The N×M cost is a product, so it is
    applied without being formed. Rows of A sum to one exactly, columns as far as the projection has converged.

    LOT attention has factors of the same form but learns where the pivots are: two small problems to solve instead
    of this joint, non-convex one. This mechanism is there to show what that saves.

    Differences from public code: that iterates until nothing moves (up to 2,000 steps), here the numbers of steps are
    fixed. On 256 random tokens of width 32 with r = 32, 20 steps reach 93 % of the total score of 100 steps, 5 reach
    65 %, 50 reach 98 %; with 10 inner steps columns are off by 0.6 % in the mean. Time, and memory in training, grow
    with `outer_steps · inner_steps`.

    Args:
        rank: r, at most the number of tokens. eps: ε. step: length of a step of mirror descent.
        seed: of the directions that start the descent (tokens are first grouped by them).
    """

    directions: Tensor

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        *,
        rank: int = 32,
        eps: float = 0.0,
        outer_steps: int = 20,
        inner_steps: int = 10,
        step: float = 3.0,
        seed: int = 0,
    ) -> None:
        super().__init__(head_dim, num_heads)
        for name, value in (("rank", rank), ("outer_steps", outer_steps), ("inner_steps", inner_steps)):
            require_count(name, value)
        require_moderate("eps", eps, least=0)
        require_moderate("step", step, most=100)  # e¹⁰⁰⁰ is no mass in fp32
        self.rank = rank
        self.eps = eps
        self.outer_steps = outer_steps
        self.inner_steps = inner_steps
        self.step = step
        draw = torch.randn(num_heads, rank, head_dim, generator=torch.Generator().manual_seed(seed))
        self.register_buffer("directions", draw)

    def attend(self, inputs: Inputs) -> Tensor:
        q, k, v, key_mask, query_mask, *_ = inputs
        query_plan, key_plan = self.factors(q, k, key_mask, query_mask)
        with no_autocast(q.device.type):
            out = query_plan @ (key_plan.mT @ zero_padding(v, key_mask).to(key_plan.dtype))
        return inputs.finished(out)

    def factors(
        self, q: Tensor, k: Tensor, key_mask: Tensor | None = None, query_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`N·Q` `(B, H, N, r)`, rows sum to one, and `R diag(1/g)` `(B, H, M, r)`, columns sum to one."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        with no_autocast(q.device.type):
            queries = zero_padding(q, query_mask).to(dtype) * self.head_dim**-0.5
            keys = zero_padding(k, key_mask).to(dtype)
            log_a, log_b = _log_masses(queries, query_mask), _log_masses(keys, key_mask)
            directions = self.directions.to(dtype)
            log_q = log_a + (queries @ directions.mT).log_softmax(-1)
            log_r = log_b + (keys @ directions.mT * self.head_dim**-0.5).log_softmax(-1)
            log_g = torch.full_like(log_q[:, :, :1], -math.log(self.rank))
            for _ in range(self.outer_steps):
                kernels = self._descend(queries, keys, log_q, log_r, log_g)
                log_q, log_r, log_g = self._project(*kernels, log_a, log_b)
            query_plan = zero_padding(log_q.softmax(-1), query_mask)
            key_plan = zero_padding(log_r.softmax(-2), key_mask)
        return query_plan, key_plan

    def _descend(
        self, queries: Tensor, keys: Tensor, log_q: Tensor, log_r: Tensor, log_g: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One step of mirror descent: logarithms of the kernels that are projected next."""
        plan_q, plan_r, g = log_q.exp(), log_r.exp(), log_g.exp()
        cost_r, cost_q = -queries @ (keys.mT @ plan_r), -keys @ (queries.mT @ plan_q)
        slopes = cost_r / g, cost_q / g, -(plan_q * cost_r).sum(-2, keepdim=True) / g.square()
        steepest = torch.stack([slope.detach().abs().amax((-2, -1)) for slope in slopes]).amax(0)
        # at most 1 / ε, which leads to the minimum of the linearised cost: beyond it every step overshoots
        gamma = self.step / steepest.clamp_min(max(1e-6, self.step * self.eps))[..., None, None]
        kernel_q, kernel_r, kernel_g = (
            (1 - gamma * self.eps) * log - gamma * slope
            for log, slope in zip((log_q, log_r, log_g), slopes, strict=True)
        )
        return kernel_q, kernel_r, kernel_g

    def _project(
        self, kernel_q: Tensor, kernel_r: Tensor, kernel_g: Tensor, log_a: Tensor, log_b: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The nearest couplings, in relative entropy, with the right marginals and a common inner one.

        The sets are affine, so Dykstra's corrections cancel and alternating projections are left.
        """
        column_q, column_r, g = torch.zeros_like(kernel_g), torch.zeros_like(kernel_g), kernel_g
        row_q, row_r = log_a, log_b
        for _ in range(self.inner_steps):
            row_q = log_a - torch.logsumexp(kernel_q + column_q, -1, keepdim=True)
            row_r = log_b - torch.logsumexp(kernel_r + column_r, -1, keepdim=True)
            sum_q = torch.logsumexp(kernel_q + row_q, -2, keepdim=True)
            sum_r = torch.logsumexp(kernel_r + row_r, -2, keepdim=True)
            g = (kernel_g + sum_q + sum_r) / 3
            column_q, column_r = g - sum_q, g - sum_r
        return kernel_q + row_q + column_q, kernel_r + row_r + column_r, g


def _log_masses(x: Tensor, mask: Tensor | None) -> Tensor:
    """Log masses `(B, 1, N, 1)`: uniform over real tokens, next to nothing on padding.

    A sample without real tokens is solved as if its (zeroed) tokens were real; its plans are dropped afterwards.
    """
    if mask is None:
        return x.new_full((x.shape[0], 1, x.shape[2], 1), -math.log(x.shape[2]))
    mask = mask | ~mask.any(-1, keepdim=True)
    masses = -mask.sum(-1, keepdim=True).to(x.dtype).log()
    return torch.where(mask, masses, _NO_MASS)[:, None, :, None]


def cost(n: int, d: int, *, rank: int = 32, outer_steps: int = 20, inner_steps: int = 10, **_: object) -> Cost:
    """Each outer step applies the factored cost twice; each inner step is four passes over two n×r kernels."""
    outer = 8.0 * n * d * rank + inner_steps * 16.0 * n * rank
    return Cost(
        flops=4.0 * n * d * rank + outer_steps * outer + 4.0 * n * rank * d,
        bytes=16.0 * n * d + outer_steps * inner_steps * 32.0 * n * rank,
    )


ENTRY = Entry(
    name="lowrank-ot",
    build=LowRankOT,
    summary="A coupling of queries and keys optimised at low rank by mirror descent, for every input anew.",
    citation="Scetbon, Cuturi & Peyré 2021, Low-Rank Sinkhorn Factorization",
    cost=cost,
    time="n",
    doubly_stochastic="converged",
)
