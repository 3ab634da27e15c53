"""The CPU kernel computes the operator: values and every gradient agree with the fp64 reference."""

from __future__ import annotations

import itertools

import pytest
import torch

from lotformer.ops import cpu, lot_attention
from support.cpu_kernel import FORMS, assert_agrees, errors, exact, needs_kernel, problem, run, scored

pytestmark = needs_kernel

EPS = (1.0, 0.3, 0.1, 0.05, 0.01)
SHAPES = {
    "deit": {"n": 197, "m": 197, "rank": 32, "dim": 64},
    "cross": {"n": 45, "m": 130, "rank": 16, "dim": 24, "value_dim": 40},
    "odd": {"n": 37, "m": 53, "rank": 7, "dim": 13, "value_dim": 5},
    "more pivots than tokens": {"n": 30, "m": 20, "rank": 65, "dim": 33},
    "widest": {"batch": 1, "heads": 1, "n": 70, "m": 50, "rank": 256, "dim": 256},
    "several ranges": {"batch": 1, "heads": 1, "n": 2500, "m": 2311, "rank": 32, "dim": 16},
}


def tolerance(eps: float) -> float:
    return 1e-5 if eps >= 0.05 else 1e-4


CASES = [
    (shape, eps, form)
    for shape, eps, form in itertools.product(SHAPES, EPS, FORMS)
    # few queries decide what many pivots send: there the rounding of scores alone costs more, in any solver
    if shape != "widest" or eps >= 0.1 or "balance" not in FORMS[form]
]


@pytest.mark.parametrize(("shape", "eps", "form"), CASES)
def test_values_and_gradients_agree_with_the_reference(shape: str, eps: float, form: str) -> None:
    x = problem(**SHAPES[shape])
    got = run(x, torch.float32, "cpu", eps=eps, **FORMS[form])
    assert_agrees(got, run(x, torch.float64, "reference", eps=eps, **exact(form)), tolerance(eps))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize("shape", [{"rank": 1}, {"n": 1, "m": 1}, {"n": 1, "m": 9}, {"n": 9, "m": 1}], ids=str)
def test_degenerate_shapes_agree_where_gradients_vanish(shape: dict[str, int], eps: float, form: str) -> None:
    x = problem(**shape)
    got = run(x, torch.float32, "cpu", eps=eps, **FORMS[form])
    assert_agrees(got, run(x, torch.float64, "reference", eps=eps, **exact(form)), tolerance(eps), floor=0.3 / eps)


@pytest.mark.parametrize("eps", [10.0, 100.0])
@pytest.mark.parametrize("shape", ["deit", "cross", "odd"])
def test_at_large_eps_it_is_as_good_as_fp32_can_be(shape: str, eps: float) -> None:
    """The plans are nearly uniform there and score gradients are differences of numbers ε times their size."""
    x = problem(**SHAPES[shape])
    expected = run(x, torch.float64, "reference", eps=eps)
    plain = errors(run(x, torch.float32, "reference", eps=eps), expected)
    for name, error in errors(run(x, torch.float32, "cpu", eps=eps), expected).items():
        assert error <= max(1e-5, 2 * plain[name]), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("eps", [1.0, 0.3, 0.1])
@pytest.mark.parametrize("shape", ["deit", "odd", "more pivots than tokens", "several ranges"])
def test_given_scores_agree(shape: str, eps: float, form: str) -> None:
    x = scored(problem(**SHAPES[shape], query_masses=True, key_masses=True))
    heads = x["q"].shape[1]
    got = run(x, torch.float32, "cpu", eps=torch.full((heads,), eps), **FORMS[form])
    eps_of_heads = torch.full((heads,), eps).double()
    assert_agrees(got, run(x, torch.float64, "reference", eps=eps_of_heads, **exact(form)), tolerance(eps), x)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("eps", [1.0, 0.1, 0.05])
@pytest.mark.parametrize("masses", ["query_masses", "key_masses", "both"])
def test_gradients_of_token_masses_agree(masses: str, eps: float, form: str) -> None:
    wanted = {name: masses in (name, "both") for name in ("query_masses", "key_masses")}
    x = problem(n=50, m=41, **wanted)
    got = run(x, torch.float32, "cpu", eps=eps, **FORMS[form])
    assert_agrees(got, run(x, torch.float64, "reference", eps=eps, **exact(form)), tolerance(eps))


@pytest.mark.parametrize("form", FORMS)
def test_a_learned_eps_per_head_gets_its_gradient(form: str) -> None:
    x = problem()
    eps = torch.tensor([1.0, 0.3, 0.07])
    got = run(x, torch.float32, "cpu", eps=eps, **FORMS[form])
    assert_agrees(got, run(x, torch.float64, "reference", eps=eps.double(), **exact(form)), 1e-5, x)


@pytest.mark.parametrize("balance", ["both", "keys"])
@pytest.mark.parametrize("iters", [1, 2, 9])
def test_any_number_of_sweeps_agrees(iters: int, balance: str) -> None:
    x = problem(query_masses=True, key_masses=True)
    options = {"eps": 0.3, "iters": iters, "balance": balance}
    assert_agrees(run(x, torch.float32, "cpu", **options), run(x, torch.float64, "reference", **options), 1e-5)


@pytest.mark.parametrize("scores", [(-20.0,), (-50.0, -80.0), (-100.0, -2000.0)], ids=str)
@pytest.mark.parametrize("form", ["sinkhorn, keys", "newton, keys", "none"])
def test_pivots_that_hardly_any_query_wants_agree(form: str, scores: tuple[float, ...]) -> None:
    """Logarithms of masses that the keys have to be solved for."""
    x = problem(n=50, m=41, query_masses=True, key_masses=True)
    x["q"][..., -1], x["k"][..., -1] = 1.0, 0.1
    x["pivots"][..., -1] = 0.0
    for j, score in enumerate(scores):
        x["pivots"][:, j, -1] = 19**0.5 * score
    got = run(x, torch.float32, "cpu", **FORMS[form])
    assert_agrees(got, run(x, torch.float64, "reference", **exact(form)), 1e-5)


@pytest.mark.parametrize("n", [197, 1500], ids=["all tokens", "sample first"])
@pytest.mark.parametrize("eps", [1.0, 0.1])
def test_newton_reaches_its_tolerance_where_sinkhorn_does_not(n: int, eps: float) -> None:
    """With the identity as values the output is the attention matrix, here of as many keys as values have columns."""
    x = {name: t.float() for name, t in problem(1, 2, n, 197, 32, 64, 197).items()}
    x["v"] = torch.eye(197).expand(1, 2, 197, 197)

    def residual(solver: str) -> float:
        columns = lot_attention(**x, eps=eps, solver=solver, tol=1e-5, backend="cpu").double().mean(2)
        return (columns * 197 - 1).abs().max().item()

    assert residual("newton") < 1e-5
    if eps == 0.1:
        assert residual("newton") < 1e-3 * residual("sinkhorn")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("eps", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("size", [1e2, 1e4])
def test_huge_scores_stay_finite(size: float, eps: float, form: str) -> None:
    """Scores of ±size: at 1e4 their fp32 rounding alone is 1e-3, so only finiteness and row sums are promised."""
    x = problem(n=80, m=70, dim=16)
    length = (x["q"] @ x["pivots"].mT).abs().max()
    x["pivots"] *= size * eps * 16**0.5 / length
    results = run(x, torch.float32, "cpu", eps=eps, **FORMS[form])
    for name, tensor in results.items():
        assert tensor.isfinite().all(), name
    x["v"] = torch.ones_like(x["v"])
    rows = run(x, torch.float32, "cpu", eps=eps, **FORMS[form])["out"]
    torch.testing.assert_close(rows, torch.ones_like(rows), rtol=0, atol=3e-6)


@pytest.mark.parametrize("form", FORMS)
def test_one_outlying_token_does_not_hurt_the_others(form: str) -> None:
    x = problem(n=60, m=60)
    x["k"][:, :, 17] *= 100
    x["q"][:, :, 3] *= 100
    got = run(x, torch.float32, "cpu", eps=0.5, **FORMS[form])
    assert_agrees(got, run(x, torch.float64, "reference", eps=0.5, **exact(form)), 1e-4)


def test_a_common_offset_of_the_values_does_not_spoil_the_score_gradient() -> None:
    x = problem(n=64, m=64)
    x["v"] += 30
    got = run(x, torch.float32, "cpu", eps=0.3)
    assert_agrees(got, run(x, torch.float64, "reference", eps=0.3), 1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("eps", [1.0, 0.1])
def test_bf16_inputs_are_computed_in_fp32(eps: float, form: str) -> None:
    """The only roundings are those of the inputs, which both sides share, and of the results."""
    plain = problem(n=99, m=70, rank=24, dim=40)
    for given in (plain, scored(plain)):
        x = {name: t.bfloat16().double() if name in ("q", "k", "v") else t for name, t in given.items()}
        cotangent = torch.randn(2, 3, 99, 40, dtype=torch.float64).bfloat16().double()
        got = run(x, torch.bfloat16, "cpu", cotangent, eps=eps, **FORMS[form])
        assert got["out"].dtype == torch.bfloat16
        expected = run(x, torch.float64, "reference", cotangent, eps=eps, **exact(form))
        half_unit = 2.0**-9
        assert_agrees(got, expected, half_unit)
        for name in {"pivots", "log_masses"} & x.keys():  # fp32 results of fp32 arithmetic
            assert_agrees({"x": got[f"grad of {name}"]}, {"x": expected[f"grad of {name}"]}, 2e-5)


def test_long_sums_do_not_drift() -> None:
    x = problem(batch=1, heads=1, n=131072, m=1000, rank=8, dim=4)
    got = run(x, torch.float32, "cpu")
    assert_agrees(got, run(x, torch.float64, "reference"), 1e-5)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("eps", [0.5, 0.02], ids=["scaling form", "log form"])
@pytest.mark.parametrize("form", FORMS)
def test_one_long_head_agrees_though_its_rows_lie_in_the_results(form: str, eps: float, threads: int) -> None:
    masses = threads == 1  # their gradient takes passes of its own
    rank = 32 if threads == 1 else 29  # not of whole vectors
    x = problem(batch=1, heads=1, n=8300, m=8240, rank=rank, dim=64, query_masses=masses, key_masses=masses)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = run(x, torch.float32, "cpu", eps=eps, **FORMS[form])
    finally:
        torch.set_num_threads(before)
    assert_agrees(got, run(x, torch.float64, "reference", eps=eps, **exact(form)), tolerance(eps))


def test_threads_do_not_change_the_result() -> None:
    """Few heads: tokens are shared among threads. Many: heads are."""
    x = problem(batch=1, heads=3, n=3000, m=2900, rank=32, dim=16)
    threads = torch.get_num_threads()
    try:
        results = {}
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results[count] = run(x, torch.float32, "cpu", eps=0.3)
    finally:
        torch.set_num_threads(threads)
    for count in (2, 5):
        assert_agrees(results[count], {name: t.double() for name, t in results[1].items()}, 2e-6)


def test_a_second_derivative_is_refused() -> None:
    x = {name: t.float().requires_grad_() for name, t in problem(n=8, m=8).items()}
    out = lot_attention(**x, backend="cpu")
    (grad,) = torch.autograd.grad(out.sum(), x["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match='backend="reference"'):
        grad.sum().backward()


@pytest.mark.parametrize("isa", cpu.instruction_sets())
@pytest.mark.parametrize("eps", [1.0, 0.1, 0.02])
@pytest.mark.parametrize("form", FORMS)
def test_values_of_any_size_have_finite_averages(
    form: str, eps: float, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of range are neither sums of values before they are divided nor their products with scalings."""
    monkeypatch.setenv("LOTFORMER_CPU_ISA", isa)
    for plain in (problem(), problem(n=150, m=150, value_dim=16)):
        for x in (plain, scored(plain)):
            expected = run(x, torch.float64, "reference", eps=eps, **FORMS[form])
            as_usual = errors(run(x, torch.float32, "cpu", eps=eps, **FORMS[form]), expected)
            large = x | {"v": x["v"] * 2.0**102}
            got = run(large, torch.float32, "cpu", eps=eps, **FORMS[form])
            expected = {name: t if name == "grad of v" else t * 2.0**102 for name, t in expected.items()}
            for name, error in errors({n: t.double() for n, t in got.items()}, expected).items():
                assert error <= 1e-5 + 2 * as_usual[name], name
