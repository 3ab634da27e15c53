"""Promise 1: rows sum to one always, columns as far as the solve has converged; rank ≤ R; entries ≥ 0."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lotformer
from support.problems import lengths_mask, make_inputs, random_masses

ALL_EPS = [0.01, 0.05, 0.1, 1.0, 10.0, 100.0]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("eps", ALL_EPS)
@pytest.mark.parametrize(("solver", "iters"), [("sinkhorn", 1), ("sinkhorn", 5), ("sinkhorn", 20), ("newton", 5)])
def test_row_sums_are_one_to_rounding(dtype, eps, solver, iters):
    x = make_inputs(n=37, m=23, rank=7, dtype=dtype)
    plan = lotformer.coupling(*x.without_values, eps=eps, solver=solver, iters=iters)
    tolerance = 1e-13 if dtype == torch.float64 else 2e-6
    for sums in (plan.dense().sum(-1), plan.row_sums()):
        torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=tolerance)
    assert (plan.dense() >= 0).all()


@pytest.mark.parametrize("eps", ALL_EPS)
@pytest.mark.parametrize(("n", "m"), [(41, 41), (41, 17)], ids=["self", "cross"])
def test_newton_column_sums_are_n_over_m_within_tol_in_fp64(eps, n, m):
    x = make_inputs(n=n, m=m, rank=11, dim=16)
    plan = lotformer.coupling(*x.without_values, eps=eps, solver="newton", tol=1e-6)
    columns = plan.dense().sum(-2)
    torch.testing.assert_close(columns, torch.full_like(columns, n / m), rtol=1e-6, atol=0)
    assert plan.residual().max() < 1e-6
    assert plan.doubly_stochastic_error().max() < 1e-6


@pytest.mark.parametrize("eps", ALL_EPS)
def test_newton_column_sums_hold_in_fp32(eps):
    x = make_inputs(n=197, rank=32, dim=64, dtype=torch.float32)
    plan = lotformer.coupling(*x.without_values, eps=eps, solver="newton")
    assert plan.residual().max() < (2e-4 if eps == 0.01 else 1e-5)


def test_tighter_tol_gives_smaller_residual():
    x = make_inputs(n=31, rank=8)
    loose, tight = (
        lotformer.coupling(*x.without_values, eps=0.05, solver="newton", tol=tol).residual().max()
        for tol in (1e-1, 1e-10)
    )
    assert tight < 1e-10 < loose < 1e-1


@pytest.mark.parametrize("eps", [0.1, 0.3, 1.0])
def test_sinkhorn_column_sums_converge_as_sweeps_grow(eps):
    x = make_inputs(n=29, rank=6)
    residuals = [
        lotformer.coupling(*x.without_values, eps=eps, iters=iters).residual().max().item()
        for iters in (1, 3, 10, 3000)
    ]
    assert residuals[0] > residuals[1] > residuals[2] > residuals[3]
    assert residuals[-1] < 1e-9


@pytest.mark.parametrize("solver", ["sinkhorn", "newton"])
def test_five_sweeps_are_far_from_doubly_stochastic_at_small_eps_and_the_residual_says_so(solver):
    x = make_inputs(n=64, rank=16, dim=32)
    residual = lotformer.coupling(*x.without_values, eps=0.05, solver=solver).residual().max()
    assert (residual > 0.5) if solver == "sinkhorn" else (residual < 1e-6)


@given(n=st.integers(1, 40), m=st.integers(1, 40), rank=st.integers(1, 48), eps=st.sampled_from(ALL_EPS))
def test_rank_never_exceeds_the_pivots_and_newton_converges_for_every_shape(n, m, rank, eps):
    x = make_inputs(batch=1, heads=2, n=n, m=m, rank=rank)
    plan = lotformer.coupling(*x.without_values, eps=eps, solver="newton")
    assert (plan.rank() <= min(rank, n, m)).all()
    assert (plan.rank() >= 1).all()
    assert plan.residual().max() < 1e-6


@pytest.mark.parametrize("kind", ["shared", "per-head"])
def test_key_masses_set_the_column_sums(kind):
    batch, heads, n, m = 2, 3, 21, 13
    x = make_inputs(batch, heads, n, m)
    mask = lengths_mask([13, 8], m)
    masses = random_masses(batch, m, mask=mask) if kind == "shared" else random_masses(batch, heads, m, mask=mask)
    plan = lotformer.coupling(*x.without_values, eps=0.3, solver="newton", tol=1e-10, key_masses=masses, key_mask=mask)
    expected = n * masses.reshape(batch, -1, m).expand(batch, heads, m)
    torch.testing.assert_close(plan.dense().sum(-2), expected, rtol=1e-9, atol=1e-12)
    assert plan.residual().max() < 1e-9
    assert plan.doubly_stochastic_error().min() > 0.1  # not doubly stochastic, and it says so


def test_query_masses_weight_the_column_sums():
    x = make_inputs(2, 3, 21, 13)
    masses = random_masses(2, 3, 21)
    plan = lotformer.coupling(*x.without_values, solver="newton", tol=1e-10, query_masses=masses)
    weighted = (masses[..., None] * plan.dense()).sum(-2)
    torch.testing.assert_close(weighted, torch.full_like(weighted, 1 / 13), rtol=1e-9, atol=0)
    assert plan.residual().max() < 1e-9
    assert plan.doubly_stochastic_error().max() > 1e-3


def test_the_doubly_stochastic_error_counts_keys_and_queries_without_mass():
    x = make_inputs(1, 2, 6, 6)
    masses = lengths_mask([3], 6).double() / 3
    plan = lotformer.coupling(*x.without_values, solver="newton", key_masses=masses)
    assert plan.residual().max() < 1e-6
    torch.testing.assert_close(plan.doubly_stochastic_error(), torch.ones(1, 2).double())  # half of the columns are 0

    plan = lotformer.coupling(*x.without_values, solver="newton", query_masses=masses)
    expected = (plan.dense().sum(-2) - 1).abs().amax(-1)
    torch.testing.assert_close(plan.doubly_stochastic_error(), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("eps", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("log_mass", [-85.0, -200.0, -torch.inf])
def test_a_pivot_that_lost_its_mass_is_like_no_pivot(log_mass, eps, dtype):
    x = make_inputs(1, 2, 23, rank=6, dtype=dtype)
    log_masses = x.log_masses.clone()
    log_masses[:, 2] = log_mass
    log_masses = log_masses.log_softmax(-1)
    kept = [0, 1, 3, 4, 5]
    with_it = lotformer.coupling(x.q, x.k, x.pivots, log_masses, eps=eps, solver="newton")
    without = lotformer.coupling(x.q, x.k, x.pivots[:, kept], log_masses[:, kept], eps=eps, solver="newton")
    assert with_it.residual().max() < 1e-4
    torch.testing.assert_close(with_it.dense(), without.dense(), rtol=0, atol=1e-4)
    got = lotformer.lot_attention(x.q, x.k, x.v, x.pivots, log_masses, eps=eps, solver="newton")
    torch.testing.assert_close(got, without.apply(x.v), rtol=0, atol=1e-4)


def test_sweeps_stay_finite_when_a_pivot_has_no_mass():
    x = make_inputs(1, 2, 23, rank=6, dtype=torch.float32, requires_grad=True)
    log_masses = x.log_masses.detach().clone()
    log_masses[:, 2] = -torch.inf
    log_masses = log_masses.log_softmax(-1).requires_grad_()
    out = lotformer.lot_attention(*x[:4], log_masses)
    torch.testing.assert_close(out, lotformer.lot_attention(*x[:4], log_masses, backend="reference"))
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), [*x[:4], log_masses]))


def test_learned_pivot_masses_keep_the_matrix_doubly_stochastic():
    layer = lotformer.attention.build("lot", head_dim=8, num_heads=2, rank=6, solver="newton", mass_temperature=0.1)
    with torch.no_grad():
        layer.pivots.logits.bias.normal_(std=0.2)
    q, k = torch.randn(2, 1, 2, 33, 8)
    plan = layer.coupling(q, k)
    assert plan.masses.max() / plan.masses.min() > 5
    assert plan.doubly_stochastic_error().max() < 1e-5


def test_clusters_decompose_the_measures_and_the_coupling():
    x = make_inputs(n=15, m=9, rank=4)
    plan = lotformer.coupling(*x.without_values, solver="newton", tol=1e-12)
    queries, keys = plan.query_clusters(), plan.key_clusters()
    torch.testing.assert_close(queries.sum(-1), torch.full_like(queries[..., 0], 1 / 15))
    torch.testing.assert_close(keys.sum(-1), torch.full_like(keys[..., 0], 1 / 9))
    torch.testing.assert_close(queries.sum(-2), plan.masses.expand(2, -1, -1))
    torch.testing.assert_close(keys.sum(-2), plan.masses.expand(2, -1, -1))
    glued = (queries / plan.masses[:, None]) @ keys.mT  # Σ_t C^μ_t ⊗ C^ν_t / p0_t
    torch.testing.assert_close(15 * glued, plan.dense())


def test_the_output_is_the_dense_matrix_applied_to_the_values():
    x = make_inputs(n=15, m=9, value_dim=6)
    for solver in ("sinkhorn", "newton"):
        plan = lotformer.coupling(*x.without_values, eps=0.5, solver=solver)
        out = lotformer.lot_attention(*x, eps=0.5, solver=solver)
        torch.testing.assert_close(plan.dense() @ x.v, out)
        torch.testing.assert_close(plan.apply(x.v), out)


@pytest.mark.parametrize("n", [20, 60])
@pytest.mark.parametrize("eps", [0.05, 0.02, 0.01])
def test_newton_converges_where_pivots_lie_on_tokens_and_plans_are_nearly_permutations(eps, n):
    """The hardest problems there are: at ε = 0.01 the scores of a token span 500 and more."""
    q = 2 * torch.randn(16, 12, n, 32)
    k = q + 0.3 * torch.randn_like(q)
    pivots = 0.3 * torch.cat([k[:, :, torch.randperm(n)[:16]], torch.randn(16, 12, 16, 32)], 2)
    log_masses = (0.5 * torch.randn(12, 32)).log_softmax(-1)
    identity = torch.eye(n).expand(16, 12, n, n)
    for dtype, bound in ((torch.float64, 1e-5), (torch.float32, 1e-4)):
        inputs = [x.to(dtype) for x in (q, k, identity, pivots, log_masses)]
        columns = lotformer.lot_attention(*inputs, eps=eps, solver="newton", tol=1e-5).sum(2)
        assert (columns - 1).abs().max() < bound
