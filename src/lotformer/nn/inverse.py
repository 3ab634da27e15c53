"""An inverse by matrix products alone: differentiable, batched, and fast where factorisations are not."""

from __future__ import annotations

import torch
from torch import Tensor


def iterative_pseudo_inverse(matrix: Tensor, iters: int = 6) -> Tensor:
    """Pseudo-inverse of `K (..., m, n)` by `V ← ¼ V (13 I − K V (15 I − K V (7 I − K V)))`.

    Starts from `Kᵀ / (‖K‖₁ ‖K‖_∞)`, taken per matrix so that a sample does not depend on its batch. Converges to
    the pseudo-inverse; singular values below about `2^-iters` of the largest are still damped when it stops.
    """
    magnitude = matrix.abs()
    bound = magnitude.sum(-1).amax(-1) * magnitude.sum(-2).amax(-1)
    inverse = matrix.mT / torch.where(bound > 0, bound, 1.0)[..., None, None]
    identity = torch.eye(matrix.shape[-2], dtype=matrix.dtype, device=matrix.device)
    for _ in range(iters):
        product = matrix @ inverse
        inner = 15 * identity - product @ (7 * identity - product)
        inverse = 0.25 * inverse @ (13 * identity - product @ inner)
    return inverse
