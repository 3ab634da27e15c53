"""Promise 4: gradients are right, for every input, both solvers, with and without masks."""

from __future__ import annotations

import pytest
import torch

import lotformer
from support.problems import lengths_mask, make_inputs, random_masses

SOLVERS = ["sinkhorn", "newton"]


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("mass_shape", ["shared", "per-head"])
def test_gradcheck_of_every_input(solver, masked, mass_shape):
    batch, heads, n, m = 2, 2, 6, 5
    x = make_inputs(batch, heads, n, m, rank=3, dim=4, value_dim=3, requires_grad=True)
    query_mask = lengths_mask([6, 3], n) if masked else None
    key_mask = lengths_mask([2, 5], m, "left") if masked else None
    shape = (batch,) if mass_shape == "shared" else (batch, heads)
    query_masses = random_masses(*shape, n, mask=query_mask).requires_grad_()
    key_masses = random_masses(*shape, m, mask=key_mask).requires_grad_()
    eps = torch.tensor([0.4, 1.3], dtype=torch.float64, requires_grad=True)

    def operator(q, k, v, pivots, log_masses, eps, query_masses, key_masses):
        return lotformer.lot_attention(
            q, k, v, pivots, log_masses, eps=eps, solver=solver, iters=3, tol=1e-13,
            query_mask=query_mask, key_mask=key_mask, query_masses=query_masses, key_masses=key_masses,
        )  # fmt: skip

    assert torch.autograd.gradcheck(operator, (*x, eps, query_masses, key_masses), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("eps", [0.05, 0.3, 1.0])
def test_newton_gradient_is_the_gradient_through_two_thousand_sweeps(eps):
    x = make_inputs(1, 2, 15, 12, rank=4, requires_grad=True)
    key_masses = random_masses(1, 2, 12).requires_grad_()
    leaves = (*x, key_masses)
    cotangent = torch.randn(1, 2, 15, 8, dtype=torch.float64)
    exact, unrolled = (
        torch.autograd.grad(lotformer.lot_attention(*x, eps=eps, key_masses=key_masses, **options), leaves, cotangent)
        for options in ({"solver": "newton", "tol": 1e-13}, {"solver": "sinkhorn", "iters": 2000})
    )
    for name, got, expected in zip(("q", "k", "v", "pivots", "log_masses", "key_masses"), exact, unrolled, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("eps", [0.01, 0.1, 1.0, 100.0])
@pytest.mark.parametrize("magnitude", [1.0, 1e2, 1e4])
def test_values_and_gradients_stay_finite_for_any_eps_and_scores_up_to_1e4(solver, eps, magnitude):
    x = make_inputs(1, 2, 40, rank=9, dtype=torch.float32)
    largest = (x.q @ x.pivots.mT * 8**-0.5 / eps).abs().max()
    factor = min(1.0, 1e4 / largest.item()) if magnitude == 1.0 else magnitude / largest.item()
    q, k = ((factor * t).requires_grad_() for t in (x.q, x.k))
    pivots = x.pivots.clone().requires_grad_()
    out = lotformer.lot_attention(q, k, x.v, pivots, x.log_masses, eps=eps, solver=solver)
    assert out.isfinite().all()
    # a convex combination of values cannot leave their range
    assert (out.amax(2) <= x.v.amax(2) + 1e-5).all()
    assert (out.amin(2) >= x.v.amin(2) - 1e-5).all()
    for grad in torch.autograd.grad(out.square().sum(), (q, k, pivots)):
        assert grad.isfinite().all()


def test_key_masses_module_receives_gradients_through_the_operator():
    mechanism = lotformer.attention.build("lot", head_dim=8, num_heads=2, rank=4, key_masses="query-aware")
    q, k, v = torch.randn(3, 2, 2, 11, 8)
    mechanism(q, k, v).square().sum().backward()
    for name, parameter in mechanism.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_second_derivatives_are_right_for_sinkhorn_and_refused_for_newton():
    x = make_inputs(1, 1, 5, rank=2, dim=3, requires_grad=True)

    def gradient(q, solver):
        out = lotformer.lot_attention(q, *x[1:], eps=0.7, solver=solver, iters=2)
        return torch.autograd.grad(out.square().sum(), q, create_graph=True)[0]

    assert torch.autograd.gradcheck(lambda q: gradient(q, "sinkhorn"), (x.q,))
    with pytest.raises(NotImplementedError, match="no second derivative"):
        gradient(x.q, "newton")
