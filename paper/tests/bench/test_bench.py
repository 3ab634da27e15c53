"""The benchmarks run, say where their numbers come from, and refuse to time a kernel that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lotformer.cli.main import app
from lotformer.ops import backends, reference
from lotformer_paper.bench import limits, process
from lotformer_paper.bench.agreement import KernelDisagrees, check_backend
from lotformer_paper.bench.peak import Usage, measure
from lotformer_paper.bench.timing import Timing, alternate, ratios
from lotformer_paper.bench.workload import Shape, Workload, near_square
from lotformer_paper.results.provenance import thread_count
from support.cpu_kernel import needs_kernel

needs_proc = pytest.mark.skipif(not process.can_measure_peak(), reason="peak memory is read from /proc (Linux)")


def invoke(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False, env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.output


def load(folder: Path, threads: int = 1) -> dict:
    """What a benchmark left: numbers with their origin, and a table that names its command."""
    result = json.loads((folder / "result.json").read_text())
    source = result["provenance"]
    assert source["threads"] == result["settings"]["threads"] == threads
    assert source["versions"]["torch"] == torch.__version__
    assert source["command"] in (folder / "table.md").read_text()
    return result


def wrong(*problem):
    result = reference.run(*problem)
    return result._replace(out=result.out * 1.001)


def wrong_gradient(transport, *rest):
    drift = transport.q.sum() - transport.q.detach().sum()
    result = reference.run(transport, *rest)
    return result._replace(out=result.out + 0.001 * drift)


@pytest.fixture
def wrong_backends(monkeypatch):
    made = tuple(
        backends.Backend(run.__name__, run, lambda: None, lambda transport, solve: None)
        for run in (wrong, wrong_gradient)
    )
    monkeypatch.setattr(backends.TRANSPORT, "backends", (*made, *backends.TRANSPORT.backends))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_runtime_writes_every_point_and_a_figure(tmp_path, backward):
    output = invoke(
        "bench", "runtime", "--mechanisms", "softmax,local,lot", "--ranks", "4,8", "--min-n", "16", "--max-n", "64",
        "--heads", "2", "--head-dim", "8", "--threads", "1", "--seconds", "0", "--out", str(tmp_path),
        *(["--backward"] if backward else []),
    )  # fmt: skip
    result = load(tmp_path)
    assert result["settings"]["backward"] is backward
    assert ("forward + backward" if backward else "forward") in output
    panels = {p["label"]: p["panel"] for p in result["points"]}
    assert panels["softmax"] == "quadratic"
    assert panels["local"] == panels["lot r=4"] == "linear"
    assert result["lot_backend"] in backends.names()
    measured = {(p["label"], p["n"]) for p in result["points"] if p["milliseconds"] > 0 and p["repeats"] >= 3}
    labels = {"softmax", "local", "lot r=4", "lot r=8"}
    assert measured == {(label, n) for label in labels for n in (16, 32, 64)}
    assert all(label in output for label in labels)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "figure.svg").read_text()


def test_runtime_says_what_it_left_out(tmp_path):
    output = invoke(
        "bench", "runtime", "--mechanisms", "softmax,local", "--min-n", "16", "--max-n", "64", "--heads", "1",
        "--head-dim", "8", "--threads", "1", "--seconds", "0", "--time-limit", "0",
        "--out", str(tmp_path),
    )  # fmt: skip
    assert "softmax: left out from N=32: about 0 s per call, limit 0 s" in output
    skipped = {p["n"]: p["skipped"] for p in load(tmp_path)["points"] if p["label"] == "softmax"}
    assert skipped[16] is None
    assert "limit" in skipped[32]
    assert "limit" in skipped[64]


def test_what_does_not_fit_in_memory_is_not_started(monkeypatch):
    monkeypatch.setattr(process, "available", lambda: 2**30)
    assert limits.too_large(Workload("quantum-ds", Shape(512))) is None
    assert "GiB" in limits.too_large(Workload("quantum-ds", Shape(65536)))
    measured = Workload("softmax", Shape(512)), 2**29
    assert "GiB" in limits.too_large(Workload("softmax", Shape(2048)), measured)


def test_the_comparison_with_sdpa_gives_ratios_on_the_target_shapes(tmp_path):
    invoke(
        "bench", "runtime", "--against", "sdpa", "--max-n", "200", "--threads", "1", "--seconds", "0",
        "--out", str(tmp_path),
    )  # fmt: skip
    (comparison,) = load(tmp_path)["comparisons"]
    assert comparison["shape"] == {"n": 197, "batch": 16, "heads": 3, "head_dim": 64}
    times = comparison["milliseconds"]
    assert comparison["times_faster"]["sdpa"] == pytest.approx(times["sdpa"] / times["lot"])


@pytest.mark.parametrize(
    ("backend", "command", "blamed"),
    [
        ("wrong", ["bench", "runtime", "--mechanisms", "lot", "--ranks", "4"], "the output"),
        ("wrong", ["bench", "runtime", "--against", "sdpa"], "the output"),
        ("wrong", ["bench", "roofline"], "the output"),
        ("wrong", ["bench", "memory"], "the output"),
        ("wrong", ["zoo"], "the output"),
        (
            "wrong_gradient",
            ["bench", "runtime", "--mechanisms", "lot", "--ranks", "4", "--backward"],
            "the gradient of q",
        ),
        ("wrong_gradient", ["bench", "roofline"], "the gradient of q"),
        ("wrong_gradient", ["zoo"], "the gradient of q"),
    ],
    ids=[
        "runtime",
        "against-sdpa",
        "roofline",
        "memory",
        "zoo",
        "runtime-gradient",
        "roofline-gradient",
        "zoo-gradient",
    ],
)
def test_a_kernel_that_disagrees_with_the_reference_is_not_timed(wrong_backends, tmp_path, backend, command, blamed):
    output = invoke(
        *command, "--backend", backend, "--threads", "1", "--out", str(tmp_path), code=1
    )  # fmt: skip
    assert f"backend '{backend}' disagrees with the fp64 reference" in output
    assert blamed in output
    assert not list(tmp_path.iterdir())


def test_a_kernel_wrong_in_its_gradient_passes_for_the_forward_only(wrong_backends):
    options = {"rank": 4, "head_dim": 8, "heads": 2, "n": 33, "eps": 1.0, "iters": 2}
    assert check_backend("wrong_gradient", **options, backward=False) == "wrong_gradient"
    with pytest.raises(KernelDisagrees):
        check_backend("wrong_gradient", **options, backward=True)


def test_every_backend_that_runs_here_agrees():
    for backend in backends.TRANSPORT.backends:
        if not backend.why_unavailable():
            check_backend(backend.name, rank=8, head_dim=16, heads=2, n=65, eps=0.5, iters=3, backward=True)


@needs_proc
def test_memory_reports_saved_and_peak_bytes_against_sdpa(tmp_path):
    invoke(
        "bench", "memory", "--min-n", "2048", "--max-n", "2048", "--rank", "8", "--head-dim", "16", "--threads", "1",
        "--out", str(tmp_path),
    )  # fmt: skip
    points = {p["label"]: p for p in load(tmp_path)["points"]}
    assert set(points) == {"sdpa", "lot r=8"}
    for point in points.values():
        assert point["skipped"] is None
        assert point["saved_bytes"] >= 0
        assert point["peak_bytes"] >= 0


@needs_proc
def test_the_peak_counts_what_a_mechanism_really_allocates():
    """Synthesizer "random" forms an n×n matrix of weights, keeps it, and makes one for the gradient; sdpa does not."""
    n = 1500
    dense = Workload("synthesizer", Shape(n, heads=1, head_dim=8), backward=True, options={"kind": "random"})
    fused = Workload("sdpa", Shape(n, heads=1, head_dim=8), backward=True)
    matrix = 4 * n * n
    dense_usage, fused_usage = measure([dense, fused], threads=1)
    assert isinstance(dense_usage, Usage)
    assert matrix <= dense_usage.saved < 1.5 * matrix
    assert 2 * matrix <= dense_usage.peak < 5 * matrix
    assert fused_usage.saved < matrix / 100
    assert fused_usage.peak < matrix


@needs_proc
@needs_kernel
@pytest.mark.parametrize("balance", ["both", "keys", "none"])
def test_one_head_needs_no_more_memory_for_a_longer_sequence(balance):
    """Forward and backward: what is of the length of the sequence lies in results that are not written yet."""
    options = {"rank": 32, "balance": balance, "backend": "cpu"}
    shapes = [Shape(n, heads=1, head_dim=64) for n in (1 << 14, 1 << 17)]
    short, long = measure([Workload("lot", shape, backward=True, options=options) for shape in shapes], threads=1)
    assert long.peak - short.peak < 1 << 19  # four bytes per token would be 1 << 19 already
    assert long.saved == short.saved


@needs_proc
def test_a_measuring_process_that_fails_is_reported():
    with pytest.raises(RuntimeError, match=r"ended with code 1.*Unknown mechanism"):
        measure([Workload("softmux", Shape(8))], threads=1)


def test_roofline_compares_with_a_matrix_product(tmp_path):
    invoke(
        "bench", "roofline", "--max-n", "200", "--rank", "8", "--threads", "1", "--seconds", "0", "--out", str(tmp_path)
    )
    points = load(tmp_path)["points"]
    assert [p["direction"] for p in points] == ["forward", "forward + backward"]
    for point, factor in zip(points, (8, 28), strict=True):
        flops = factor * 16 * 3 * 197 * 8 * 64
        assert point["gflops_per_second"] == pytest.approx(flops / point["milliseconds"] / 1e6)
        assert point["times_limit"] == pytest.approx(point["matmul_gflops_per_second"] / point["gflops_per_second"])


def test_solvers_are_compared_with_their_residuals(tmp_path):
    invoke(
        "bench", "solvers", "--max-n", "200", "--rank", "8", "--threads", "1", "--seconds", "0", "--out", str(tmp_path)
    )
    (point,) = load(tmp_path)["points"]
    ms, residual = point["milliseconds"], point["residual"]
    assert point["newton_times"] == pytest.approx(ms["newton"] / ms["sinkhorn"])
    assert point["bf16_times_faster"] == pytest.approx(ms["sinkhorn"] / ms["sinkhorn bf16"])
    assert residual["newton"] < 1e-4 < residual["sinkhorn"]


def test_zoo_prints_and_writes_a_row_for_every_mechanism(tmp_path):
    output = invoke(
        "zoo", "--mechanisms", "softmax,lot,bigbird", "--n", "32", "--long", "64", "--heads", "2", "--head-dim", "8",
        "--threads", "1", "--seconds", "0", "--out", str(tmp_path),
    )  # fmt: skip
    rows = {row["name"]: row for row in load(tmp_path)["rows"]}
    assert list(rows) == ["softmax", "lot", "bigbird"]
    assert [rows[name]["doubly_stochastic"] for name in rows] == [None, "converged", None]
    assert [rows[name]["time"] for name in rows] == ["n²", "n", "n"]
    assert rows["lot"]["parameters"] == 2 * 32 * (8 + 1)
    assert set(rows["lot"]["milliseconds"]) == {"32", "64"}
    assert set(rows["softmax"]["milliseconds"]) == {"32"}
    assert rows["softmax"]["flops"] == {"32": 2 * 4 * 32 * 32 * 8, "64": 2 * 4 * 64 * 64 * 8}
    assert "needs as many queries as keys: bigbird." in output


@pytest.mark.parametrize("command", [("bench", "runtime", "--threads"), ("bench", "memory", "--heads"), ("zoo", "--n")])
def test_sizes_below_one_are_refused_before_anything_runs(command):
    assert command[-1] in invoke(*command, "0", code=2)


def test_alternatives_are_timed_in_turns_until_each_has_had_its_share():
    order: list[str] = []
    timings = alternate(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, seconds_each=0.0, min_repeats=4
    )
    assert order == ["a", "b"] * 5  # a round to warm up, then four
    assert timings["a"].repeats == timings["b"].repeats == 4
    assert timings["a"].best <= timings["a"].median
    assert ratios({"a": Timing(2.0, 2.0, 1), "b": Timing(6.0, 6.0, 1)}, of="a") == {"b": 3.0}


def test_the_number_of_threads_is_put_back_even_after_an_error():
    before = torch.get_num_threads()
    inside = []

    def fail() -> None:
        with thread_count(before + 1):
            inside.append(torch.get_num_threads())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert inside == [before + 1]
    assert torch.get_num_threads() == before


def test_grids_are_as_square_as_the_number_of_tokens_allows():
    assert [near_square(n) for n in (1, 7, 512, 1024)] == [(1, 1), (1, 7), (16, 32), (32, 32)]


def test_bad_options_are_named(tmp_path):
    assert "must be one of sdpa, got 'flash'" in invoke("bench", "runtime", "--against", "flash", code=2)
    assert "expected numbers" in invoke("bench", "runtime", "--mechanisms", "lot", "--ranks", "a", code=2)
    out = ("--out", str(tmp_path))
    assert "Did you mean 'softmax'" in invoke("zoo", "--mechanisms", "softmux", *out, code=1)
    assert "min-n" in invoke("bench", "memory", "--min-n", "64", "--max-n", "32", *out, code=1)
