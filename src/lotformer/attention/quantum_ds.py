"""Quantum doubly stochastic attention in its classical form: the squared orthogonal factor of a QR decomposition."""

from __future__ import annotations

import torch
from torch import Tensor

from ..nn.checks import require_moderate
from ..ops.precision import no_autocast
from .base import Attention, Cost, Entry
from .inputs import Inputs
from .masking import require_equal_lengths, shared_mask, zero_padding


class QuantumDS(Attention):
    """`A = U ∘ U` with `U R = q kᵀ D^-1/2 + ridge · I`: rows and columns of a squared orthogonal matrix sum to one.

    The publication's attention is a variational quantum circuit, which is not implemented here. This is the classical
    operator it compares with (its section "QR Decomposition", arXiv 2504.16275): the squared orthogonal factor of the
    QR decomposition of `q kᵀ`. That much is checked against its text; no code is public to compare numbers with.

    `q kᵀ` has rank D at most, so that for N > D its orthogonal factor is neither unique nor differentiable. The
    publication then adds Gaussian noise of 1e-7; we add `ridge · I`, which repeats from call to call and keeps
    gradients bounded, but leans towards the identity. `ridge=0` is the operator as published, for N ≤ D only. The
    order of tokens matters: column j is made orthogonal to those before it.

    A token takes part if it is real as a query and as a key.
    """

    def __init__(self, head_dim: int, num_heads: int, *, ridge: float = 1.0) -> None:
        super().__init__(head_dim, num_heads)
        require_moderate("ridge", ridge, least=0)
        self.ridge = ridge

    def attend(self, inputs: Inputs) -> Tensor:
        q, k, v, key_mask, query_mask, *_ = inputs
        require_equal_lengths(q, k, "quantum-ds")
        if self.ridge == 0 and q.shape[2] > self.head_dim:
            raise ValueError(
                f"quantum-ds without a ridge needs at most head_dim={self.head_dim} tokens, got {q.shape[2]}: beyond "
                "that the scores have no full rank and their orthogonal factor is not unique."
            )
        mask = shared_mask(key_mask, query_mask)
        dtype = torch.promote_types(q.dtype, torch.float32)
        with no_autocast(q.device.type):
            q_, k_, v_ = (zero_padding(x, mask).to(dtype) for x in (q, k, v))
            # a padded token is a row and a column of its own, orthogonal to all others: it changes none of them
            ridge = q_.new_full((q.shape[2],), self.ridge)
            diagonal = ridge if mask is None else torch.where(mask, ridge, 1.0)[:, None]
            orthogonal = torch.linalg.qr(self.head_dim**-0.5 * q_ @ k_.mT + diagonal.diag_embed())[0]
            out = orthogonal.square() @ v_
        return zero_padding(out.to(q.dtype), mask)


def cost(n: int, d: int, **_: object) -> Cost:
    """Scores and values as in softmax, and a Householder QR with its explicit factor, 8/3 n³; three n×n matrices."""
    return Cost(flops=4.0 * n * n * d + 8.0 / 3.0 * n**3, bytes=16.0 * n * d + 12.0 * n * n)


ENTRY = Entry(
    name="quantum-ds",
    build=QuantumDS,
    summary="Quantum doubly stochastic attention, QR form: the squared orthogonal factor of the scores.",
    citation="Born et al. 2025, Quantum Doubly Stochastic Transformers (its QR-based classical variant)",
    cost=cost,
    time="n³",
    doubly_stochastic="exact",
    needs_equal_lengths=True,
)
