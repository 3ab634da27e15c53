"""Softmax attention, by PyTorch's fused kernel."""

from __future__ import annotations

from torch import Tensor

from ..nn.checks import require_moderate, require_probability
from ..nn.softmax import fused_softmax
from .base import Attention, Cost, Entry
from .inputs import Inputs


class SoftmaxAttention(Attention):
    """`softmax(scale · q kᵀ) v` over the real keys; `scale` defaults to `D^-1/2`."""

    def __init__(self, head_dim: int, num_heads: int, *, scale: float | None = None, dropout: float = 0.0) -> None:
        super().__init__(head_dim, num_heads)
        if scale is not None:
            require_moderate("scale", scale, signed=True)
        require_probability("dropout", dropout)
        self.scale = scale
        self.dropout = dropout

    def attend(self, inputs: Inputs) -> Tensor:
        q, k, v, *_ = inputs.cleaned()
        out = fused_softmax(q, k, v, inputs.allowed, self.scale, self.dropout if self.training else 0.0)
        return inputs.finished(out)  # autocast may have lowered it


def cost(n: int, d: int, **_: object) -> Cost:
    return Cost(flops=4.0 * n * n * d, bytes=16.0 * n * d)


ENTRY = Entry(
    name="softmax",
    build=SoftmaxAttention,
    summary="Softmax attention by PyTorch's fused kernel.",
    citation="Vaswani et al. 2017, Attention Is All You Need",
    cost=cost,
)
