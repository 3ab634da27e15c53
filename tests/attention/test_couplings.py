"""Quantum-DS and low-rank transport have the marginals they promise and are what their definitions say."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from support.small_zoo import DIM, HEADS, assert_equal, make, tokens


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("n", [1, 2, 7, 40])
def test_quantum_ds_is_doubly_stochastic(n):
    q, k, _ = tokens(2, n)
    matrix = make("quantum-ds")(q, k, torch.eye(n, dtype=q.dtype).expand(2, HEADS, n, n))
    assert (matrix >= 0).all()
    assert_equal(torch.ones(2, HEADS, n, dtype=q.dtype), matrix.sum(-1))
    assert_equal(torch.ones(2, HEADS, n, dtype=q.dtype), matrix.sum(-2))


@pytest.mark.parametrize(("n", "ridge"), [(9, 1.0), (5, 0.0)], ids=["with a ridge", "as published"])
def test_quantum_ds_is_the_squared_factor_of_gram_schmidt(n, ridge):
    q, k, v = tokens(1, n)
    scores = q @ k.mT * DIM**-0.5 + ridge * torch.eye(n, dtype=q.dtype)
    columns: list[Tensor] = []
    for j in range(n):
        column = scores[..., j]
        for other in columns:
            column = column - (column * other).sum(-1, keepdim=True) * other
        columns.append(F.normalize(column, dim=-1))
    assert_equal(torch.stack(columns, -1).square() @ v, make("quantum-ds", ridge=ridge)(q, k, v), 1e-8)


def test_quantum_ds_as_published_honours_padding_and_refuses_scores_without_full_rank():
    q, k, v = tokens(1, 5)
    mask = torch.tensor([[True, False, True, True, False]])
    model = make("quantum-ds", ridge=0.0)
    kept = [x[:, :, mask[0]] for x in (q, k, v)]
    assert_equal(model(*kept), model(q, k, v, mask, mask)[:, :, mask[0]], 1e-9)
    with pytest.raises(ValueError, match=f"at most head_dim={DIM} tokens, got {DIM + 1}"):
        model(*tokens(1, DIM + 1))


def test_low_rank_transport_has_the_marginals_and_the_rank():
    q, k, v = tokens(2, 40, 31)
    model = make("lowrank-ot", rank=5, outer_steps=5, inner_steps=300)
    query_plan, key_plan = model.factors(q, k)
    matrix = query_plan @ key_plan.mT
    assert_equal(torch.ones(2, HEADS, 40, dtype=q.dtype), matrix.sum(-1))
    assert_equal(torch.full((2, HEADS, 31), 40 / 31, dtype=q.dtype), matrix.sum(-2), 1e-5)
    assert torch.linalg.matrix_rank(matrix).max() <= 5
    assert_equal(matrix @ v, model(q, k, v))


def test_low_rank_transport_descends_towards_the_optimum():
    """More steps never cost more, and at full rank the plan nears the best assignment."""
    from scipy.optimize import linear_sum_assignment

    q, _, _ = tokens(1, 12)
    k = q[:, :, torch.randperm(12)] + 0.1 * torch.randn_like(q)
    cost = -(q @ k.mT) * DIM**-0.5

    def price(steps: int) -> Tensor:
        query_plan, key_plan = make("lowrank-ot", rank=12, outer_steps=steps, inner_steps=100).factors(q, k)
        return (query_plan @ key_plan.mT * cost).sum((-2, -1)) / 12

    prices = torch.stack([price(steps) for steps in (1, 4, 16, 64)])
    assert (prices.diff(dim=0) <= 1e-6).all()
    for head in range(HEADS):
        best = cost[0, head].numpy()[linear_sum_assignment(cost[0, head].numpy())].mean()
        independent = cost[0, head].mean()
        assert (independent - prices[-1, 0, head]) / (independent - best) > 0.8


def test_by_default_low_rank_transport_is_near_convergence():
    """Most of what a hundred steps gain over the independent coupling, and columns that nearly sum to one."""
    q, k, _ = tokens(1, 48)

    def outcome(**options: int) -> tuple[Tensor, Tensor]:
        query_plan, key_plan = make("lowrank-ot", rank=8, **options).factors(q, k)
        matrix = query_plan @ key_plan.mT
        return (matrix * (q @ k.mT) * DIM**-0.5).sum((-2, -1)) / 48, (matrix.sum(-2) - 1).abs().amax(-1)

    (gain, error), (most, _) = outcome(), outcome(outer_steps=100, inner_steps=20)
    independent = (q @ k.mT).mean((-2, -1)) * DIM**-0.5
    assert ((gain - independent) / (most - independent) > 0.8).all()
    assert error.max() < 0.1
