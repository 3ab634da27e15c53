"""The exact solver holds in every case: more than 3,000 hard problems, in all precisions, on the running kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lotformer.ops import coupling, lot_attention, newton
from support.cpu_kernel import assert_agrees, needs_kernel, run
from support.hard_problems import FAMILIES, Batch, hard_problems, long_problems, make_batch
from support.problems import solve

FP32, FP64 = torch.float32, torch.float64


def residual(a: Tensor, x: Batch) -> Tensor:
    """Worst relative deviation of what the keys receive through A `(1, problems, N, M)` from their masses."""
    wanted = x.inputs["key_masses"]
    received = (x.inputs["query_masses"][..., None] * a.double()).sum(-2)
    return ((received - wanted).abs() / wanted).amax(-1)


def dense(x: Batch, backend: str, **more: str) -> Tensor:
    """A itself as the backend computes it in fp32: the values are the identity."""
    options = x.arguments(FP32) | more
    return lot_attention(
        v=torch.eye(options["k"].shape[2]).expand(*options["k"].shape[:3], -1), backend=backend, **options
    )


def test_there_are_more_than_three_thousand() -> None:
    assert sum(x.problems for x in hard_problems()) > 3000


@needs_kernel
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_and_columns_and_the_plan_itself_hold(family: str) -> None:
    for x in hard_problems(families=(family,)):
        exact = coupling(**x.arguments(FP64))
        assert exact.residual().max() <= 1e-6, x.name
        few = x.first(2)
        results = {"the kernel": (x, dense(x, "cpu")), "the reference in fp32": (few, dense(few, "reference"))}
        for name, (problems, got) in results.items():
            said = f"{name}, {x.name}"
            assert (got.sum(-1) - 1).abs().max() <= 1e-5, said
            assert residual(got, problems).max() <= 1e-4, said
            assert (got - exact.dense()[:, : problems.problems]).abs().max() <= 1e-4, said


@needs_kernel
@pytest.mark.parametrize("family", FAMILIES)
def test_they_hold_with_the_keys_alone_balanced(family: str) -> None:
    for n, rank, largest in ((33, 20, 258.0), (64, 32, 1000.0), (7, 32, 1000.0)):
        x = make_batch(family, n, rank, largest, count=8)
        exact = coupling(**x.arguments(FP64), balance="keys")
        assert exact.residual().max() <= 1e-6, x.name
        got = dense(x, "cpu", balance="keys")
        assert (got.sum(-1) - 1).abs().max() <= 1e-5, x.name
        assert residual(got, x).max() <= 1e-4, x.name
        assert (got - exact.dense()).abs().max() <= 1e-4, x.name


@needs_kernel
def test_long_sequences_hold() -> None:
    for x in long_problems():
        options = x.arguments(FP32)
        ones = torch.ones(*options["k"].shape[:3], 1)
        assert (lot_attention(v=ones, backend="cpu", **options) - 1).abs().max() <= 1e-5, x.name
        exact = coupling(**x.arguments(FP64))
        assert exact.residual().max() <= 1e-6, x.name
        v = torch.randn(*options["k"].shape[:3], 8, generator=torch.Generator().manual_seed(0))
        error = lot_attention(v=v, backend="cpu", **options) - exact.apply(v.double())
        assert error.abs().max() <= 1e-4, x.name


@needs_kernel
@pytest.mark.parametrize("eps", [0.01, 0.003, 0.001])
def test_rows_sum_to_one_where_columns_once_underflowed(eps: float) -> None:
    torch.manual_seed(7)
    q, k, z = 3 * torch.randn(100, 1, 64, 64), 3 * torch.randn(100, 1, 64, 64), torch.randn(100, 1, 32, 64)
    log_masses = torch.full((1, 32), 1 / 32).log()
    a = lot_attention(
        q, k, torch.eye(64).expand(100, 1, 64, 64), z, log_masses, eps=eps, solver="newton", backend="cpu"
    )
    assert (a.sum(-1) - 1).abs().max() <= 1e-6
    assert (a.sum(-2) - 1).abs().max() <= 1e-5


@needs_kernel
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_hold(family: str) -> None:
    """Skewed masses: without ties, where the solution is not on the edge of a jump."""
    for largest in (258.0, 1000.0):
        x = make_batch(family, 33, 20, largest, count=4)
        inputs = x.inputs | {"v": torch.randn(1, 4, 33, 6, generator=torch.Generator().manual_seed(1)).double()}
        options = {"eps": 1.0, "scale": 1.0, "solver": "newton"}
        expected = run(inputs, FP64, "reference", **options)
        assert_agrees(run(inputs, FP32, "cpu", **options), expected, 1e-3)


@needs_kernel
def test_a_solve_that_stalls_in_fp32_is_done_again() -> None:
    """Masses over dozens of orders of magnitude, beside a sample that is solved at once: values and gradients hold."""
    x = make_batch("gaussian", 80, 40, 2e4, skew=10.0).inputs
    tokens = {name: t[0, [21, 0]][:, None] for name, t in x.items() if t.dim() > 2 and name != "pivots"}
    log_masses = x["log_masses"][21:22]
    inputs = tokens | {
        "pivots": x["pivots"][:1],
        "log_masses": log_masses,
        "v": torch.eye(80).double().expand(2, 1, -1, -1),
    }
    options = {"eps": 1.0, "scale": 1.0, "solver": "newton"}
    expected = run(inputs, FP64, "reference", **options)
    got = run(inputs, FP32, "cpu", **options)
    assert (got["out"] - expected["out"]).abs().max() <= 1e-5
    assert_agrees(got, expected, 1e-3, floor=1e-4)
    reached = solve(**{name: t.float() for name, t in inputs.items()}, **options).residual
    assert reached.max() <= 1e-5


@pytest.mark.parametrize(
    ("problems", "balance"),
    [
        (make_batch("gaussian", 80, 40, 1e4, skew=10.0), "both"),
        (make_batch("unrelated", 120, 40, 3000.0), "keys"),
    ],
    ids=["masses over many orders of magnitude", "massless pivots"],
)
def test_a_long_path_is_walked_to_its_end(problems: Batch, balance: str) -> None:
    assert coupling(**problems.arguments(FP64), balance=balance).residual().max() <= 1e-6


@needs_kernel
@pytest.mark.filterwarnings("ignore:LOT attention reached")
def test_what_is_done_again_in_vain_is_no_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newton, "MAX_PASSES", 100)
    x = make_batch("gaussian", 80, 40, 1e4, skew=10.0).arguments(FP32)
    residual = solve(v=x["q"][..., :1], backend="cpu", **x).residual
    assert residual.max() <= 1.0
