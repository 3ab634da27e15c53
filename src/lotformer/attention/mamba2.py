"""Mamba-2's state-space duality as attention: a decaying linear memory, in chunks."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..nn.checks import require_count
from ..nn.short_conv import ShortConv
from ..ops.precision import no_autocast
from .base import Attention, Cost, Entry
from .blocks import into_blocks
from .inputs import Inputs
from .masking import require_equal_lengths, zero_padding
from .recurrent import lower_triangle, require_value_width, run_directions


class Mamba2(Attention):
    """The selective state space of Mamba-2 with `B = k`, `C = q`, `x = v`, one state per head.

        S_t = exp(A_h Δ_t) S_{t-1} + Δ_t k_t v_tᵀ,     y_t = S_tᵀ q_t + skip_h v_t,     A_h < 0
        out = RMSNorm(y ∘ SiLU(q W_h))

    q, k and v first pass a causal convolution with SiLU (`conv_size`, None for SiLU alone). `gate=False` leaves the
    norm alone, `norm=False` both.

    Differences from the public block: every head has its own B and C (`ngroups` = heads, where 1 is usual), states are
    D×D, and Δ and the gate, which are computed there from the layer's input, come from the key and the query of each
    head here, `Δ = softplus(w_h·k + b_h)`. With `bidirectional=False` the rest is the same, parameter for parameter.

    Args:
        norm_groups: the norm runs over the H·D channels in this many groups: 1, as is usual, or `num_heads`, as in the
            public block with as many groups as heads.
        conv_bias: whether the convolution has a bias, as is usual.

    The rule runs along the order of tokens. For encoders `bidirectional` (the default) runs it from both ends with
    the same parameters and takes the mean; False is the causal publication. Padding neither decays nor writes.
    """

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        *,
        bidirectional: bool = True,
        conv_size: int | None = 4,
        conv_bias: bool = True,
        gate: bool = True,
        norm: bool = True,
        norm_groups: int = 1,
        chunk_size: int = 128,
    ) -> None:
        super().__init__(head_dim, num_heads)
        require_count("chunk_size", chunk_size)
        require_count("norm_groups", norm_groups)
        if num_heads % norm_groups:
            raise ValueError(f"norm_groups must divide num_heads={num_heads}, got {norm_groups}.")
        self.bidirectional = bidirectional
        self.chunk_size = chunk_size
        self.log_rate = nn.Parameter(torch.empty(num_heads).uniform_(1, 16).log())
        self.step = nn.Parameter(head_dim**-0.5 * torch.randn(num_heads, head_dim))
        start = torch.exp(torch.empty(num_heads).uniform_(math.log(1e-3), math.log(1e-1)))
        self.step_bias = nn.Parameter(start + torch.log(-torch.expm1(-start)))  # softplus gives `start`
        self.skip = nn.Parameter(torch.ones(num_heads))
        channels = num_heads * head_dim
        self.convs = (
            None
            if conv_size is None
            else nn.ModuleList(ShortConv(channels, conv_size, bias=conv_bias) for _ in range(3))
        )
        self.norm_groups = norm_groups
        self.norm = nn.Parameter(torch.ones(channels)) if norm else None
        self.gate = nn.Parameter(head_dim**-0.5 * torch.randn(num_heads, head_dim, head_dim)) if gate and norm else None

    @property
    def is_causal(self) -> bool:
        return not self.bidirectional

    def attend(self, inputs: Inputs) -> Tensor:
        q, k, v, key_mask, query_mask, *_ = inputs
        require_equal_lengths(q, k, "mamba2")
        if self.convs is not None or self.norm is not None:
            require_value_width(v, self.head_dim, "mamba2")
        dtype = torch.promote_types(q.dtype, torch.float32)
        with no_autocast(q.device.type):
            # the convolution of the queries would carry padding on, so it is cleaned even without a query mask
            clean_q = zero_padding(q, key_mask if query_mask is None else query_mask)
            clean = clean_q, zero_padding(k, key_mask), zero_padding(v, key_mask)
            queries, keys, values = (x.to(dtype) for x in clean)
            step = (keys * self.step.to(dtype)[:, None]).sum(-1, keepdim=True)
            step = zero_padding(F.softplus(step + self.step_bias.to(dtype)[:, None, None]), key_mask)
            out = run_directions(self._causal, (queries, keys, values, step), self.bidirectional)
            if self.gate is not None:
                out = out * F.silu(queries @ self.gate.to(dtype))
            if self.norm is not None:
                out = self._normalize(out, self.norm.to(dtype))
        return inputs.finished(out)

    def _normalize(self, out: Tensor, weight: Tensor) -> Tensor:
        """Root mean square norm over groups of the channels of all heads, `(B, H, N, D)` in and out."""
        channels = out.transpose(1, 2).flatten(2).unflatten(2, (self.norm_groups, -1))
        normed = F.rms_norm(channels, channels.shape[3:], eps=1e-5).flatten(2) * weight
        return normed.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _causal(self, q: Tensor, k: Tensor, v: Tensor, step: Tensor) -> Tensor:
        if self.convs is None:
            q, k, v = (F.silu(x) for x in (q, k, v))
        else:
            q, k, v = (conv(x) for conv, x in zip(self.convs, (q, k, v), strict=True))
        rate = -self.log_rate.to(step.dtype).exp()[:, None, None]
        mixed = state_space(q, k, step * v, rate * step, self.chunk_size)
        return mixed + self.skip.to(v.dtype)[:, None, None] * v


def state_space(q: Tensor, k: Tensor, x: Tensor, log_decay: Tensor, chunk_size: int) -> Tensor:
    """`S_t = exp(log_decay_t) S_{t-1} + k_t x_tᵀ`, `y_t = S_tᵀ q_t`, for `q, k (B, H, N, D)`, `log_decay (B, H, N, 1)`.

    Within a chunk this is a masked attention with weights `exp(Σ_{j < t <= i} log_decay_t)`; between chunks the
    state is carried on. All exponents are sums of decays, so none is positive.
    """
    length, size = q.shape[2], min(chunk_size, max(q.shape[2], 1))
    q, k, x, log_decay = (into_blocks(t, size) for t in (q, k, x, log_decay))
    since_start = log_decay.cumsum(-2)  # (B, H, T, chunk, 1)
    between = since_start - since_start.mT
    decay = between.masked_fill(~lower_triangle(size, q), -torch.inf).exp()
    within = (q @ k.mT * decay) @ x

    total = since_start[..., -1:, :]
    added = (k * (total - since_start).exp()).mT @ x
    kept = total.exp()
    state = torch.zeros_like(added[:, :, 0])
    states = []
    for chunk in range(q.shape[2]):
        states.append(state)
        state = kept[:, :, chunk] * state + added[:, :, chunk]
    out = within + (q * since_start.exp()) @ torch.stack(states, 2)
    return out.flatten(2, 3)[:, :, :length]


def cost(
    n: int, d: int, *, bidirectional: bool = True, conv_size: int | None = 4, chunk_size: int = 128, **_: object
) -> Cost:
    """Per token: two products with the chunk, its decays, and two with the state; a state kept per chunk."""
    chunk = min(chunk_size, n)
    token = 4.0 * chunk * d + 3.0 * chunk + 4.0 * d * d + 6.0 * (conv_size or 0) * d
    runs = 2 if bidirectional else 1
    state = 4.0 * n / chunk * d * d
    return Cost(flops=runs * n * token + 2.0 * n * d * d, bytes=runs * (40.0 * n * d + 12.0 * n * chunk + 2.0 * state))


ENTRY = Entry(
    name="mamba2",
    build=Mamba2,
    summary="Mamba-2's state space in chunks: a decaying recurrent memory; run from both ends by default.",
    citation="Dao & Gu 2024, Transformers are SSMs: Generalized Models and Efficient Algorithms",
    cost=cost,
    time="n",
    is_matrix=False,
    causal_only="bidirectional=False",
    needs_equal_lengths=True,
)
