"""Polarised rows of a prefix in one pass over keys and values: C++."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .operators import FLOAT, differentiable_once, fresh_like, rows, why_not_here


def run(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, beta: float, powers: tuple[float, float]) -> Tensor:
    """`beside.pool`."""
    like, opposite = powers
    given = {"q": rows(q), "k": rows(k), "v": rows(v), "key_mask": key_mask}
    return _operator(**given, beta=beta, like=like, opposite=opposite)[0]


def why_unsupported(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> str | None:
    return why_not_here(FLOAT, q, k, v)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty((*q.shape[:3], k.shape[2]))


def _fake_backward(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), fresh_like(rows(k)), fresh_like(rows(v))


_operator = differentiable_once("pool", fakes=(_fake_forward, _fake_backward), advice='Use `backend="reference"`.')
