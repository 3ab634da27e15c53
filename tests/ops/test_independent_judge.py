"""Promise 3: the plans are the transport plans that POT finds, and finite T is plain Sinkhorn."""

from __future__ import annotations

import numpy as np
import ot
import pytest
import torch

import lotformer
from support.problems import make_inputs, random_masses


def couplings(x, eps, **options):
    """The two transport plans tokens×pivots of the first sample and head, and their costs, as numpy."""
    plan = lotformer.coupling(*x.without_values, eps=eps, **options)
    scale = x.q.shape[-1] ** -0.5
    costs = [(-scale * t[0, 0] @ x.pivots[0].T).numpy() for t in (x.q, x.k)]
    return plan.query_clusters()[0, 0].numpy(), plan.key_clusters()[0, 0].numpy(), *costs


@pytest.mark.parametrize("eps", [0.05, 0.3, 1.0, 10.0])
@pytest.mark.parametrize("masses", ["uniform", "given"])
def test_newton_plans_are_the_entropic_plans_of_pot(eps, masses):
    x = make_inputs(1, 1, 14, 11, rank=4)
    a1, a2 = (
        (torch.full((1, n), 1 / n, dtype=torch.float64) for n in (14, 11))
        if masses == "uniform"
        else (random_masses(1, 14), random_masses(1, 11))
    )
    query_plan, key_plan, query_cost, key_cost = couplings(
        x, eps, solver="newton", tol=1e-12, query_masses=a1, key_masses=a2
    )
    p0 = x.log_masses[0].exp().numpy()
    for ours, a, cost in ((query_plan, a1, query_cost), (key_plan, a2, key_cost)):
        theirs = ot.bregman.sinkhorn_log(a[0].numpy(), p0, cost, eps, numItermax=20_000, stopThr=1e-11)
        np.testing.assert_allclose(ours, theirs, atol=1e-8)


def test_plans_approach_the_unregularised_optimum_as_eps_vanishes():
    x = make_inputs(1, 1, 12, rank=4)
    p0 = x.log_masses[0].exp().numpy()
    gaps = []
    for eps in (1.0, 0.1, 0.01, 0.001):
        query_plan, key_plan, query_cost, key_cost = couplings(x, eps, solver="newton", tol=1e-9)
        uniform = np.full(12, 1 / 12)
        gaps.append(
            sum(
                (plan * cost).sum() - ot.emd2(uniform, p0, cost)
                for plan, cost in ((query_plan, query_cost), (key_plan, key_cost))
            )
        )
    assert gaps == sorted(gaps, reverse=True)
    assert -1e-9 < gaps[-1] < 1e-3
    exact = ot.emd(uniform, p0, query_cost)
    np.testing.assert_allclose(query_plan, exact, atol=1e-3)


@pytest.mark.parametrize("iters", [1, 2, 5, 9])
@pytest.mark.parametrize("eps", [0.2, 1.0])
def test_finite_sweeps_are_plain_sinkhorn(iters, eps):
    """Scalings u of tokens and w of pivots, alternating as in a textbook; token side closes P, pivot side closes W."""
    x = make_inputs(1, 1, 13, 10, rank=4)
    key_masses = random_masses(1, 10)
    p0 = x.log_masses[0].exp()
    plan = lotformer.coupling(*x.without_values, eps=eps, iters=iters, key_masses=key_masses)
    kernel1, kernel2 = (torch.exp(t[0, 0] @ x.pivots[0].T * 8**-0.5 / eps) for t in (x.q, x.k))

    a1, w = torch.full((13,), 1 / 13, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    for _ in range(iters):
        u = a1 / (kernel1 @ w)
        w = p0 / (kernel1.T @ u)
    u = a1 / (kernel1 @ w)
    torch.testing.assert_close(plan.query_plan[0, 0], 13 * u[:, None] * kernel1 * w)

    a2 = key_masses[0]
    u, w = a2, p0 / (kernel2.T @ a2)
    for _ in range(iters):
        u = a2 / (kernel2 @ w)
        w = p0 / (kernel2.T @ u)
    torch.testing.assert_close(plan.key_plan[0, 0], u[:, None] * kernel2 * w / p0)


def test_low_rank_transport_is_never_dearer_than_transport_through_our_pivots():
    """The paper's lemma, LrOT_r ≤ LOT_r: our glued plan is one feasible plan of rank r among all."""
    rng = np.random.default_rng(0)
    for trial in range(3):
        points_q, points_k = rng.normal(size=(2, 12, 2))
        pivots = rng.normal(size=(3, 2))
        tensors = (torch.from_numpy(t)[None, None] for t in (points_q, points_k))
        plan = lotformer.coupling(
            *tensors, torch.from_numpy(pivots)[None], torch.zeros(1, 3).double().log_softmax(-1),
            eps=0.05, solver="newton", scale=1.0,
        )  # fmt: skip
        cost = ot.dist(points_q, points_k)
        ours = (plan.dense()[0, 0].numpy() / 12 * cost).sum()
        # the low-rank problem is not convex: POT's solver needs a fair number of steps from a fixed start
        Q, R, g = ot.lowrank_sinkhorn(
            points_q, points_k, rank=3, reg=0.0, alpha=1e-10, gamma_init="rescale", seed_init=trial, numItermax=200
        )
        theirs = ((Q / g) @ R.T * cost).sum()
        np.testing.assert_allclose(((Q / g) @ R.T).sum(), 1, atol=1e-6)
        assert theirs <= ours + 1e-6


@pytest.mark.parametrize("temperature", [0.0, 0.3, 4.0])
def test_hard_espformer_is_the_expected_sliced_plan_of_pot(temperature):
    n, d = 11, 5
    q, k = torch.randn(2, 1, 1, n, d, dtype=torch.float64)
    ours = lotformer.attention.attention_matrix("espformer-hard", q, k, temperature=temperature)[0, 0]
    points = (x[0, 0].numpy() * d**-0.5 for x in (q, k))
    theirs, _ = ot.sliced.expected_sliced_plan(*points, projections=np.eye(d), metric="sqeuclidean", beta=temperature)
    np.testing.assert_allclose(ours, n * theirs, atol=1e-14)
