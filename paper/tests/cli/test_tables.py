"""Tables fit the terminal: no word is cut, no column loses its name, no number is lost."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lotformer.cli.main import app
from lotformer.cli.tables import Table
from lotformer.cli.terminal import show_table
from lotformer_paper.bench import memory, solvers, zoo
from lotformer_paper.bench.figure import Point
from lotformer_paper.bench.memory import MemoryPoint, MemoryResult, MemorySettings
from lotformer_paper.bench.runtime import RuntimeResult, RuntimeSettings
from lotformer_paper.bench.runtime import render as render_runtime
from lotformer_paper.bench.solvers import SolverPoint, SolverResult, SolverSettings
from lotformer_paper.bench.workload import TARGET_SHAPES
from lotformer_paper.bench.zoo import ZooResult, ZooRow, ZooSettings
from lotformer_paper.cli.reports import show
from lotformer_paper.results import plain
from lotformer_paper.results.provenance import provenance
from lotformer_paper.results.report import Report

SOURCE = provenance("lotformer bench", threads=2, seed=0)


def printed(report: Report, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    show(console, report)
    return console.file.getvalue()


def assert_readable(text: str, report: Report, width: int = 80) -> None:
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "…" not in text
    for table in report.tables:
        words = {word for column in table.columns for word in column.split("\n")}
        words |= {cell for row in table.rows for cell in row}
        for word in words:
            assert word in text, word
        assert all(column.strip() for column in table.columns)


def zoo_result(tmp_path: Path) -> Report:
    flags = {"stochastic": True, "fixed_length": True, "needs_equal_lengths": True, "needs_grid": True}
    rows = [
        ZooRow(name, "", "", time, exact, None, **flags, parameters=8_320, flops={1024: 4.2e12, 16384: 9.9e12},
               milliseconds={1024: 99999.0, 16384: 12345.6}, peak_bytes=2**36)
        for name, time, exact in (("linear-transformer", "n", None), ("espformer-hard", "n log n", "converged"))
    ]  # fmt: skip
    plain.write(ZooResult("zoo", SOURCE, ZooSettings(), "cpu", tuple(rows)), tmp_path / "result.json")
    return zoo.render(tmp_path)


def solver_result(tmp_path: Path) -> Report:
    times = {"sinkhorn": 1234.567, "newton": 1234.567, "sinkhorn bf16": 1234.567}
    points = tuple(SolverPoint(shape, times, dict.fromkeys(times, 5.8e-07), 10.34, 0.95) for shape in TARGET_SHAPES)
    plain.write(SolverResult("solvers", SOURCE, SolverSettings(), "cpu", points), tmp_path / "result.json")
    return solvers.render(tmp_path)


def memory_result(tmp_path: Path) -> Report:
    points = (MemoryPoint("lot r=32", 131072, 2**34, 2**36), MemoryPoint("softmax", 131072, None, None, "it is large"))
    plain.write(MemoryResult("memory", SOURCE, MemorySettings(), points), tmp_path / "result.json")
    return memory.render(tmp_path)


def runtime_result(tmp_path: Path) -> Report:
    labels, lengths = ("linear-transformer", "lot r=256"), [2**p for p in range(9, 18)]
    points = tuple(Point(label, "lot", "linear", n, 12345.0) for label in labels for n in lengths)
    plain.write(RuntimeResult("runtime", SOURCE, RuntimeSettings(), "cpu", points), tmp_path / "result.json")
    return render_runtime(tmp_path)


@pytest.mark.parametrize("make", [zoo_result, solver_result, memory_result, runtime_result])
def test_every_benchmark_is_readable_at_eighty_columns(make, tmp_path):
    report = make(tmp_path)
    assert_readable(printed(report), report)


def test_the_zoo_and_the_solvers_need_no_second_part(tmp_path):
    for make in (zoo_result, solver_result):
        report = make(tmp_path)
        assert printed(report).count("─\n") == 1, "one rule below one header"


def test_what_a_mechanism_needs_stands_below_the_table(tmp_path):
    said = printed(zoo_result(tmp_path), width=200)
    assert "needs tokens on a 2-D grid: linear-transformer, espformer-hard." in said


def test_gpu_resources_are_readable_at_eighty_columns(monkeypatch):
    resources = pytest.importorskip("lotformer.ops.triton.resources", reason="needs triton")
    rows = [
        resources.Row(kernel, arch, 64, rank, "newton", 4, 254, 65536, 0)
        for kernel in ("newton_passes.newton_finish", "fused.forward")
        for arch in ("sm_80", "sm_90", "sm_100")
        for rank in (16, 32, 64, 128)
    ]
    monkeypatch.setattr(resources, "measure", lambda **_: rows)
    said = CliRunner().invoke(app, ["bench", "gpu-resources"], env={"COLUMNS": "80"}, catch_exceptions=False).output
    header, lines = resources.as_table(rows)
    assert_readable(said, Report((), (Table("", header, tuple(lines)),)))
    markdown = CliRunner().invoke(app, ["bench", "gpu-resources", "--markdown"], catch_exceptions=False).output
    assert "| kernel | R = 16 | R = 32 |" in markdown


def test_a_title_may_be_wider_than_its_table():
    console = Console(width=80, file=io.StringIO())
    show_table(console, Table("a title of some length above a table of almost none", ("a", "b"), (("1", "2"),)))
    assert "a title of some length above a table of almost none\n" in console.file.getvalue()


def test_brackets_are_text():
    console = Console(width=80, file=io.StringIO())
    show_table(console, Table("[/]", ("[a]", "[/b]"), (("[bold]x", "[/]"),)))
    for text in ("[/]", "[a]", "[/b]", "[bold]x"):
        assert text in console.file.getvalue()
