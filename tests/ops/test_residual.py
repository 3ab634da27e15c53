"""What a solve reaches is known: the operator returns it, couplings describe the running backend, misses are told."""

from __future__ import annotations

import warnings

import pytest
import torch

import lotformer
from lotformer.attention.lot import LOT
from lotformer.ops import convergence
from support.cpu_kernel import needs_kernel
from support.problems import lengths_mask, make_inputs

SOLVERS = ["sinkhorn", "newton"]
BACKENDS = ["reference", pytest.param("cpu", marks=needs_kernel)]


def bound(residual: torch.Tensor) -> torch.Tensor:
    return torch.where(residual < 1, 2 * residual / (1 - residual), torch.inf)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("eps", [1.0, 0.1])
def test_the_residual_bounds_what_the_columns_miss(eps, solver, backend):
    x = make_inputs(3, 2, 40, 30, rank=6, dtype=torch.float32)
    mask = lengths_mask([30, 11, 0], 30)
    options = {"eps": eps, "solver": solver, "iters": 3, "key_mask": mask, "backend": backend}
    out, residual = lotformer.lot_attention(*x, **options, return_residual=True)
    assert torch.equal(out, lotformer.lot_attention(*x, **options))
    assert residual.shape == (3, 2)
    assert not residual.requires_grad
    assert (residual[2] == 0).all()  # no keys: nothing is missed
    identity = torch.eye(30).expand(3, 2, 30, 30)
    columns = lotformer.lot_attention(x.q, x.k, identity, *x[3:], **options).double().sum(2)
    for sample, length in ((0, 30), (1, 11)):
        missed = (columns[sample, :, :length] / (40 / length) - 1).abs().amax(-1)
        assert (missed <= bound(residual[sample].double()) + 1e-5).all()
        if solver == "sinkhorn":
            assert (residual[sample] < 20 * missed).all()  # and is no empty bound


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_coupling_describes_the_backend_in_force(solver, backend):
    x = make_inputs(2, 3, 33, 21, rank=5, dtype=torch.float32)
    options = {"eps": 0.2, "solver": solver, "iters": 2, "query_mask": lengths_mask([33, 20], 33)}
    plan = lotformer.coupling(*x.without_values, **options, backend=backend)
    assert (
        repr(plan) == f"Coupling(33×21 of rank ≤ 5, 2 samples × 3 heads, {plan.query_plan.dtype}, backend={backend!r})"
    )
    out, residual = lotformer.lot_attention(*x, **options, backend=backend, return_residual=True)
    torch.testing.assert_close(plan.apply(x.v).to(out), out, rtol=1e-4, atol=1e-5)
    assert (plan.residual() <= bound(residual) + 1e-5).all()


@needs_kernel
def test_a_coupling_is_the_kernels_unless_gradients_are_wanted():
    x = make_inputs(1, 2, 12, dtype=torch.float32, requires_grad=True)
    assert lotformer.coupling(*x.without_values).backend == "cpu"
    assert lotformer.coupling(*make_inputs(1, 2, 12).without_values).backend == "reference"  # float64
    plan = lotformer.coupling(*x.without_values, backend="reference")
    assert torch.autograd.grad(plan.dense().square().sum(), x.q)[0].any()


@needs_kernel
def test_a_mechanism_describes_the_backend_it_runs():
    q, k = torch.randn(2, 1, 2, 9, 8)
    for backend, running in ((None, "cpu"), ("reference", "reference")):
        assert LOT(8, 2, rank=4, backend=backend).coupling(q, k).backend == running


@pytest.mark.parametrize("solver", SOLVERS)
def test_no_tokens_no_residual(solver):
    x = make_inputs(2, 3, 0, 5)
    out, residual = lotformer.lot_attention(*x, solver=solver, return_residual=True)
    assert out.shape == (2, 3, 0, 8)
    assert torch.equal(residual, torch.zeros(2, 3, dtype=torch.float64))


def test_the_residual_can_be_compiled():
    x = make_inputs(1, 2, 20, rank=4, dtype=torch.float32)

    def operator(*inputs):
        return lotformer.lot_attention(*inputs, return_residual=True)

    compiled = torch.compile(operator, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(*x), operator(*x), strict=True):
        torch.testing.assert_close(got, expected)


def test_a_miss_is_told_once(monkeypatch):
    monkeypatch.setattr(convergence, "_warned", False)
    missed, fine = torch.tensor([[1e-7, 0.2]]), torch.tensor([[1e-7, 9e-4]])
    solve = lotformer.ops.problem.Solve(solver="newton")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convergence.warn_of_a_miss(lambda: fine, solve)
        convergence.warn_of_a_miss(lambda: missed, solve._replace(tol=0.1))
    for bad in (missed, torch.tensor([[torch.nan]])):
        monkeypatch.setattr(convergence, "_warned", False)
        with pytest.warns(UserWarning, match="not the 1.0e-06 that was asked for.*Raise `eps`"):
            convergence.warn_of_a_miss(lambda bad=bad: bad, solve)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convergence.warn_of_a_miss(lambda: missed, solve)
