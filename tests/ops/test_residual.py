"""What a solve reaches is known: the operator returns it, couplings describe the running backend, misses are told."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch

import lotformer
from lotformer.attention.lot import LOT
from lotformer.ops import convergence
from lotformer.ops.problem import Solve
from support.cpu_kernel import FORMS, needs_kernel
from support.problems import lengths_mask, make_inputs, solve

SOLVERS = ["sinkhorn", "newton"]
BACKENDS = ["reference", pytest.param("cpu", marks=needs_kernel)]


def bound(residual: torch.Tensor) -> torch.Tensor:
    return torch.where(residual < 1, 2 * residual / (1 - residual), torch.inf)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("balance", ["both", "keys"])
@pytest.mark.parametrize("eps", [1.0, 0.1])
def test_the_residual_bounds_what_the_columns_miss(eps, balance, solver, backend):
    x = make_inputs(3, 2, 40, 30, rank=6, dtype=torch.float32)
    mask = lengths_mask([30, 11, 0], 30)
    options = {"eps": eps, "solver": solver, "iters": 3, "key_mask": mask, "backend": backend, "balance": balance}
    solution = solve(*x, **options)
    residual = solution.residual
    assert torch.equal(solution.out, lotformer.lot_attention(*x, **options))
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
@pytest.mark.parametrize("form", FORMS)
def test_a_coupling_describes_the_backend_in_force(form, backend):
    x = make_inputs(2, 3, 33, 21, rank=5, dtype=torch.float32)
    options = {"eps": 0.2, **FORMS[form], "iters": 2, "query_mask": lengths_mask([33, 20], 33)}
    plan = lotformer.coupling(*x.without_values, **options, backend=backend)
    assert (
        repr(plan) == f"Coupling(33×21 of rank ≤ 5, 2 samples × 3 heads, {plan.query_plan.dtype}, backend={backend!r})"
    )
    solution = solve(*x, **options, backend=backend)
    torch.testing.assert_close(plan.apply(x.v).to(solution.out), solution.out, rtol=1e-4, atol=1e-5)
    assert (plan.residual() <= bound(solution.residual) + 1e-5).all()
    assert form != "none" or not solution.residual.any()
    again = solution.coupling()
    assert (solution.backend, again.backend) == (backend, backend)
    for mine, theirs in zip(dataclasses.astuple(again)[:5], dataclasses.astuple(plan)[:5], strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_solution_says_which_heads_have_converged(backend):
    x = make_inputs(2, 3, 40, rank=6, dtype=torch.float32)
    eps = torch.tensor([1.0, 0.3, 0.02])
    exact = solve(*x, eps=eps, solver="newton", backend=backend)
    assert exact.converged.tolist() == [[True] * 3] * 2
    sweeps = solve(*x, eps=eps, iters=2, backend=backend)
    assert sweeps.converged.dtype == torch.bool
    assert not sweeps.converged[:, 2].any()
    assert torch.equal(sweeps.converged, sweeps.residual <= 1e-3)
    unsolved = solve(*x, eps=eps, balance="none", backend=backend)
    assert unsolved.converged.all()


def test_a_solution_does_not_print_its_tensors():
    assert repr(solve(*make_inputs(1, 2, 5))) == "Solution(out=(1, 2, 5, 8) torch.float64, backend='reference')"


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
    solution = solve(*x, solver=solver)
    assert solution.out.shape == (2, 3, 0, 8)
    assert torch.equal(solution.residual, torch.zeros(2, 3, dtype=torch.float64))
    assert solution.converged.all()
    assert solution.coupling().query_plan.shape == (2, 3, 0, 5)


def test_the_residual_can_be_compiled():
    x = make_inputs(1, 2, 20, rank=4, dtype=torch.float32)

    def operator(*inputs):
        solution = solve(*inputs)
        return solution.out, solution.residual

    compiled = torch.compile(operator, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(*x), operator(*x), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.fixture
def not_warned(monkeypatch):
    monkeypatch.setattr(convergence, "_warned", False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_solve_that_misses_its_tolerance_says_so_once(backend, not_warned):
    x = make_inputs(2, 2, 64, rank=8, dim=16, dtype=torch.float32)
    beyond_fp32 = [1e12 * t for t in x[:2]]
    options = {"solver": "newton", "eps": 0.01, "backend": backend}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lotformer.lot_attention(*x, **options)
    with pytest.warns(UserWarning, match=r"reached a residual of .*, not the 1\.0e-06 .* Raise `eps`") as told:
        lotformer.lot_attention(*beyond_fp32, *x[2:], **options)
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lotformer.lot_attention(*beyond_fp32, *x[2:], **options)


@pytest.mark.parametrize(("reached", "tol", "told"), [
    (9e-4, 1e-6, False), (2e-3, 1e-6, True), (2e-3, 1e-4, False), (2e-3, None, True), (torch.nan, 0.5, True),
])  # fmt: skip
def test_only_wide_misses_are_told(reached, tol, told, not_warned):
    residual = torch.tensor([[0.0, reached, 1e-7]])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        convergence.warn_of_a_miss(lambda: residual, Solve(solver="newton", tol=tol))
    assert bool(caught) == told


@pytest.mark.parametrize("solver", ["sinkhorn", "newton"])
@pytest.mark.parametrize(("mass", "counts"), [(1e-4, True), (1e-6, True), (1e-12, False), (1e-30, False)])
def test_a_key_that_goes_without_counts_if_its_share_can_be_seen_in_an_output(mass, counts, solver):
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2, 40, 8).unbind(0)
    masses = torch.ones(1, 2, 40)
    masses[..., 0] = mass * 40
    masses = masses / masses.sum(-1, keepdim=True)
    plan = lotformer.coupling(
        q,
        k,
        torch.randn(2, 6, 8),
        torch.zeros(2, 6).log_softmax(-1),
        eps=1.0,
        iters=40,
        solver=solver,
        key_masses=masses,
    )
    assert plan.residual().max() < 1e-4
    without = dataclasses.replace(plan, key_plan=plan.key_plan.index_fill(2, torch.tensor([0]), 0.0))
    assert without.deviations().shape == (1, 2, 40)
    assert bool((without.residual() > 0.9).all()) == counts
    assert bool((without.residual() < 1e-3).all()) == (not counts)
