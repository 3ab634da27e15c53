"""Which marginals are imposed: both, the keys' alone, or none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lotformer
from lotformer.ops.problem import BALANCES, SOLVERS
from support.cpu_kernel import needs_kernel
from support.problems import solve

EXACT = {"sinkhorn": {"eps": 2.0, "iters": 60}, "newton": {"eps": 0.2, "solver": "newton", "tol": 1e-9}}


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.fixture
def problem() -> dict[str, Tensor]:
    """Two samples, one of them padded, with fewer keys than queries."""
    return {
        "q": draw(2, 3, 11, 5),
        "k": draw(2, 3, 9, 5),
        "pivots": draw(3, 4, 5),
        "log_masses": draw(3, 4).log_softmax(-1),
        "query_mask": torch.arange(11) < torch.tensor([[11], [6]]),
        "key_mask": torch.arange(9) < torch.tensor([[4], [9]]),
    }


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("balance", ["both", "keys"])
def test_columns_get_their_masses_whether_or_not_the_queries_are_solved(problem, balance, solver):
    plan = lotformer.coupling(**problem, balance=balance, **EXACT[solver])
    assert plan.residual().max() < 1e-7
    assert plan.doubly_stochastic_error().max() < 1e-7


@pytest.mark.parametrize("solver", SOLVERS)
def test_without_a_solve_on_the_keys_the_masses_in_force_are_what_they_receive(problem, solver):
    plan = lotformer.coupling(**problem, balance="none", **EXACT[solver])
    counts = problem["query_mask"].sum(-1)[:, None, None]
    torch.testing.assert_close(plan.dense().sum(-2), counts * plan.key_masses)
    assert plan.residual().max() < 1e-12
    assert plan.doubly_stochastic_error().max() > 0.1


@pytest.mark.parametrize("balance", BALANCES)
def test_rows_sum_to_one_and_padding_receives_nothing(problem, balance):
    plan = lotformer.coupling(**problem, balance=balance, eps=0.05, iters=2)
    torch.testing.assert_close(plan.row_sums(), problem["query_mask"][:, None].double().expand(2, 3, 11))
    assert (plan.column_sums()[0, :, 4:] == 0).all()


def test_unsolved_queries_spread_by_softmax_with_the_masses_as_prior(problem):
    plan = lotformer.coupling(**problem, balance="keys", eps=0.5)
    q, pivots, log_masses = problem["q"], problem["pivots"], problem["log_masses"]
    expected = torch.softmax(q @ pivots.mT / 5**0.5 / 0.5 + log_masses[:, None], -1)
    torch.testing.assert_close(plan.query_plan[0], expected[0])
    torch.testing.assert_close(plan.masses, plan.query_clusters().sum(-2))


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("balance", BALANCES)
def test_scores_give_what_tokens_and_pivots_give(problem, balance, solver):
    v, eps = draw(2, 3, 9, 6), torch.tensor([0.3, 1.0, 2.0], dtype=torch.float64)
    pivots, q, k = (problem.pop(name) for name in ("pivots", "q", "k"))
    options = {**problem, "balance": balance, "solver": solver, "eps": eps}
    expected = solve(q, k, v, pivots, **options)
    scores = [x @ pivots.mT / 5**0.5 for x in (q, k)]
    got = solve(*scores, v, None, **options, scale=1.0)
    torch.testing.assert_close(got.out, expected.out, rtol=0, atol=1e-11)
    torch.testing.assert_close(got.residual, expected.residual, rtol=1e-6, atol=1e-11)
    assert torch.equal(got.out, lotformer.lot_attention_from_scores(*scores, v, **options))


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("balance", BALANCES)
def test_gradients_with_token_masses_and_pivots_of_samples(balance, solver):
    logits = [draw(2, 1, 5), draw(2, 1, 4)]
    mask = torch.arange(4) < torch.tensor([[4], [3]])
    inputs = (draw(2, 1, 5, 3), draw(2, 1, 4, 3), draw(2, 1, 4, 2), draw(2, 1, 3, 3), draw(1, 3), *logits)

    def attend(q, k, v, pivots, log_masses, query_logits, key_logits):
        return lotformer.lot_attention(
            q, k, v, pivots, log_masses.log_softmax(-1), eps=0.5, solver=solver, tol=1e-10, balance=balance,
            key_mask=mask, query_masses=query_logits.softmax(-1),
            key_masses=key_logits.masked_fill(~mask[:, None], -torch.inf).softmax(-1),
        )  # fmt: skip

    assert torch.autograd.gradcheck(attend, [x.requires_grad_() for x in inputs], fast_mode=True)


@pytest.mark.parametrize("balance", ["keys", "none"])
def test_a_pivot_that_no_query_wants_stays_finite(problem, balance):
    problem["pivots"] = torch.cat([problem["pivots"], -1e3 * problem["q"][0].mean(1, keepdim=True)], 1)
    problem["log_masses"] = torch.zeros(3, 5, dtype=torch.float64).log_softmax(-1)
    problem = {name: x.requires_grad_() if x.dtype != torch.bool else x for name, x in problem.items()}
    v = draw(2, 3, 9, 6).requires_grad_()
    for solver in SOLVERS:
        out = lotformer.lot_attention(v=v, **problem, eps=0.1, solver=solver, balance=balance)
        grads = torch.autograd.grad(out.square().sum(), [v, problem["q"], problem["k"], problem["pivots"]])
        assert all(x.isfinite().all() for x in (out, *grads))


def test_wrong_arguments_are_named(problem):
    with pytest.raises(ValueError, match="`balance`: expected 'both' or 'keys' or 'none', got 'rows'"):
        lotformer.coupling(**problem, balance="rows")
    scores, v, log_masses = draw(2, 3, 9, 4), draw(2, 3, 9, 6), draw(3, 4).log_softmax(-1)
    with pytest.raises(ValueError, match=r"`key_scores`: expected \(2, 3, M, 4\) to match query_scores"):
        lotformer.lot_attention_from_scores(scores, scores[..., :3], v, log_masses)
    with pytest.raises(ValueError, match=r"`log_masses`: expected \(3, 4\)"):
        lotformer.lot_attention_from_scores(scores, scores, v, log_masses[:, :3].log_softmax(-1))
    with pytest.raises(TypeError, match="lot_attention_from_scores"):
        lotformer.lot_attention(scores, scores, v, None, log_masses)


@needs_kernel
def test_samples_whose_exact_solve_misses_are_solved_by_the_reference(monkeypatch):
    q, k, v, pivots = draw(3, 2, 9, 4), draw(3, 2, 7, 4), draw(3, 2, 7, 5), draw(3, 2, 3, 4)
    inputs = [x.float().requires_grad_() for x in (q, k, v, pivots)]
    options = {"log_masses": torch.full((2, 3), 1 / 3).log(), "eps": 0.3, "solver": "newton", "balance": "keys"}
    options["tol"] = 1e-12  # which fp32 misses in every sample
    monkeypatch.setattr("lotformer.ops.cpu.op._WORTH_A_SECOND", 0.0)
    found = {}
    for backend in ("reference", "cpu"):
        solution = solve(*inputs, **options, backend=backend)
        gradients = torch.autograd.grad(solution.out.square().sum(), inputs)
        found[backend] = [solution.out, solution.residual, *gradients]
    for got, expected in zip(found["cpu"], found["reference"], strict=True):
        assert torch.equal(got, expected)


@needs_kernel
def test_a_loose_tolerance_is_taken_at_its_word(monkeypatch):
    q, k, v, pivots = draw(8, 2, 40, 8), draw(8, 2, 40, 8), draw(8, 2, 40, 5), draw(2, 6, 8)
    inputs = [x.float() for x in (q, k, v, pivots)]
    monkeypatch.setattr("lotformer.ops.reference.run", None)  # nobody solves it again
    options = {"log_masses": torch.full((2, 6), 1 / 6).log(), "eps": 0.1, "solver": "newton", "balance": "keys"}
    loose = solve(*inputs, **options, tol=0.03).residual
    tight = solve(*inputs, **options, tol=1e-6).residual
    assert 1e-4 < loose.max() <= 0.03
    assert tight.max() <= 1e-5
