"""Distances of a mechanism from the softmax attention it replaces, on the same queries, keys and values."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ...attention import Attention
from ...attention.masking import zero_padding
from ...attention.softmax import SoftmaxAttention
from ...data.batches import Batch
from ...training.precision import widened
from ..hosts.sites import mechanism_of, require_converted
from .activations import Activations, Attended, projected

Objective = Literal["output", "attention", "both"]

_ATTENTION_SHARE = 0.1  # of the row cross-entropy in "both"


def check_objective(objective: str) -> None:
    if objective not in get_args(Objective):
        raise ValueError(f"objective must be one of {', '.join(map(repr, get_args(Objective)))}, got {objective!r}.")


def loss(mechanism: Attention, seen: Attended, projection: Tensor | None, objective: Objective) -> Tensor:
    """The objective of one layer on one batch, a scalar."""
    if objective == "output":
        return output_error(mechanism, seen, projection)
    if objective == "attention":
        return row_cross_entropy(mechanism, seen)
    return output_error(mechanism, seen, projection) + _ATTENTION_SHARE * row_cross_entropy(mechanism, seen)


def output_error(mechanism: Attention, seen: Attended, projection: Tensor | None) -> Tensor:
    """`‖(o − o*) Woᵀ‖² / ‖o* Woᵀ‖²`: the relative error as the rest of the model sees it, after the projection."""
    student = mechanism(seen.q, seen.k, seen.v, seen.mask, seen.mask, grid=seen.grid)
    error = projected(student, projection) - seen.target
    return error.square().sum() / seen.target.square().sum().clamp_min(1e-12)


@torch.no_grad()
def fresh_errors(model: nn.Module, batch: Batch) -> dict[str, float] | None:
    """The output error of every converted layer on one batch, with the mechanisms as they are.

    None if all of them read such inputs as softmax does.
    """
    with Activations(model, [batch], memory_limit=1 << 40) as cache:
        if not cache.telling:
            return None
        seen = cache[0]
        return {
            name: float(output_error(mechanism_of(module), seen[name], cache.projections[name]))
            for name, module in require_converted(model)
        }


def tells_nothing(model: nn.Module, batch: Batch) -> bool:
    """True if all converted layers read this batch as softmax does."""
    with Activations(model, [batch], memory_limit=1 << 40) as cache:
        return not cache.telling


def row_cross_entropy(mechanism: Attention, seen: Attended) -> Tensor:
    """`−Σ_j A*_ij log A_ij`, mean over real rows: Hedgehog's distillation. Forms both matrices."""
    student = widened(dense(mechanism, seen))
    student = student.clamp_min(1e-8) / student.clamp_min(1e-8).sum(-1, keepdim=True)
    with torch.no_grad():
        target = widened(dense(_softmax(mechanism), seen))
    entropy = -(target * student.log()).sum(-1)
    if seen.mask is None:
        return entropy.mean()
    real = seen.mask[:, None].expand_as(entropy)
    return (entropy * real).sum() / real.sum()


def dense(mechanism: Attention, seen: Attended) -> Tensor:
    """The matrix `(B, H, N, M)` a mechanism applies to its values, read off by giving it the identity."""
    length = seen.k.shape[2]
    identity = torch.eye(length, dtype=seen.v.dtype, device=seen.v.device).expand(*seen.k.shape[:2], length, length)
    return mechanism(seen.q, seen.k, zero_padding(identity, seen.mask), seen.mask, seen.mask, grid=seen.grid)


def _softmax(mechanism: Attention) -> SoftmaxAttention:
    return SoftmaxAttention(mechanism.head_dim, mechanism.num_heads)
