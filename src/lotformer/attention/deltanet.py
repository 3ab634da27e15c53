"""DeltaNet: linear attention whose memory overwrites what it holds under a key instead of adding to it."""

from __future__ import annotations

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


class DeltaNet(Attention):
    """The delta rule, in chunks.

        S_t = S_{t-1} + β_t k_t (v_t - S_{t-1}ᵀ k_t)ᵀ,     o_t = S_tᵀ q_t D^-1/2,     |q_t| = |k_t| = 1

    q, k and v first pass a causal convolution with SiLU (`conv_size`, None for SiLU alone); β = sigmoid(w_h·k + b_h)
    from the key of each head, where the publication uses the layer's input; the output passes RMSNorm per head.

    The rule runs along the order of tokens. For encoders `bidirectional` (the default) runs it from both ends with
    the same parameters and takes the mean; False is the causal publication. Padding writes nothing.
    """

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        *,
        bidirectional: bool = True,
        conv_size: int | None = 4,
        norm: bool = True,
        chunk_size: int = 64,
    ) -> None:
        super().__init__(head_dim, num_heads)
        require_count("chunk_size", chunk_size)
        self.bidirectional = bidirectional
        self.chunk_size = chunk_size
        self.gate = nn.Parameter(head_dim**-0.5 * torch.randn(num_heads, head_dim))
        self.gate_bias = nn.Parameter(torch.zeros(num_heads))
        channels = num_heads * head_dim
        self.convs = None if conv_size is None else nn.ModuleList(ShortConv(channels, conv_size) for _ in range(3))
        self.norm = nn.Parameter(torch.ones(head_dim)) if norm else None

    @property
    def is_causal(self) -> bool:
        return not self.bidirectional

    def attend(self, inputs: Inputs) -> Tensor:
        q, k, v, key_mask, query_mask, *_ = inputs
        require_equal_lengths(q, k, "deltanet")
        if self.convs is not None or self.norm is not None:
            require_value_width(v, self.head_dim, "deltanet")
        dtype = torch.promote_types(q.dtype, torch.float32)
        with no_autocast(q.device.type):
            # the convolution of the queries would carry padding on, so it is cleaned even without a query mask
            clean_q = zero_padding(q, key_mask if query_mask is None else query_mask)
            clean = clean_q, zero_padding(k, key_mask), zero_padding(v, key_mask)
            queries, keys, values = (x.to(dtype) for x in clean)
            gate = (keys * self.gate.to(dtype)[:, None]).sum(-1, keepdim=True)
            beta = zero_padding((gate + self.gate_bias.to(dtype)[:, None, None]).sigmoid(), key_mask)
            out = run_directions(self._causal, (queries, keys, values, beta), self.bidirectional)
            if self.norm is not None:
                out = F.rms_norm(out, (self.head_dim,), self.norm.to(dtype), eps=1e-5)
        return inputs.finished(out)

    def _causal(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        if self.convs is None:
            q, k, v = (F.silu(x) for x in (q, k, v))
        else:
            q, k, v = (conv(x) for conv, x in zip(self.convs, (q, k, v), strict=True))
        q, k = F.normalize(q, dim=-1) * self.head_dim**-0.5, F.normalize(k, dim=-1)
        return delta_rule(q, k, v, beta, self.chunk_size)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, chunk_size: int) -> Tensor:
    """`S_t = S_{t-1} + β_t k_t (v_t - S_{t-1}ᵀ k_t)ᵀ`, `o_t = S_tᵀ q_t`, for `q, k (B, H, N, D)`, `beta (B, H, N, 1)`.

    Within a chunk the writes `u_t = β_t (v_t - S_{t-1}ᵀ k_t)` solve a unit lower triangular system,
    `(I + tril(β K Kᵀ, -1)) U = β (V - K S)`, so that only the state at the start of a chunk is carried on.
    """
    length, size = q.shape[2], min(chunk_size, max(q.shape[2], 1))
    q, k, v, beta = (into_blocks(x, size) for x in (q, k, v, beta))
    system = (beta * (k @ k.mT)).tril(-1)
    solved = torch.linalg.solve_triangular(system, torch.cat([beta * v, beta * k], -1), upper=False, unitriangular=True)
    from_values, from_state = solved.split([v.shape[-1], k.shape[-1]], -1)
    within = (q @ k.mT).masked_fill(~lower_triangle(size, q), 0.0)

    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    states, writes = [], []
    for chunk in range(q.shape[2]):
        states.append(state)
        written = from_values[:, :, chunk] - from_state[:, :, chunk] @ state
        writes.append(written)
        state = state + k[:, :, chunk].mT @ written
    out = q @ torch.stack(states, 2) + within @ torch.stack(writes, 2)
    return out.flatten(2, 3)[:, :, :length]


def cost(
    n: int, d: int, *, bidirectional: bool = True, conv_size: int | None = 4, chunk_size: int = 64, **_: object
) -> Cost:
    """Per token: two products with the chunk, a triangular solve, three with the state; a state kept per chunk."""
    chunk = min(chunk_size, n)
    taps = 6.0 * (conv_size or 0) * d
    token = 2.0 * chunk * d * 2 + 2.0 * chunk * d + 2.0 * chunk * d + 6.0 * d * d + taps
    runs = 2 if bidirectional else 1
    return Cost(flops=runs * n * token, bytes=runs * (48.0 * n * d + 8.0 * n * chunk + 4.0 * n / chunk * d * d))


ENTRY = Entry(
    name="deltanet",
    build=DeltaNet,
    summary="The delta rule in chunks: a recurrent memory that overwrites; run from both ends by default.",
    citation="Yang et al. 2024, Parallelizing Linear Transformers with the Delta Rule over Sequence Length",
    cost=cost,
    time="n",
    is_matrix=False,
    causal_only="bidirectional=False",
    needs_equal_lengths=True,
)
