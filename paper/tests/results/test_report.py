"""Numbers are stored before anything is rendered, and rendering needs nothing but the numbers."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from lotformer.cli.main import app
from lotformer.cli.tables import Table
from lotformer_paper.results import figures
from lotformer_paper.results.report import Report

ARGUMENTS = ("--mechanisms", "lot", "--ranks", "4", "--min-n", "16", "--max-n", "32", "--heads", "1", "--head-dim", "8",
             "--threads", "1", "--seconds", "0")  # fmt: skip


def invoke(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"}, catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def no_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(figures, "can_draw", lambda: False)


def test_a_report_is_markdown_with_its_commands():
    table = Table("Title", ("shape", "two\nlines"), (("a", "1"),))
    page = Report(("lotformer a", "lotformer b"), (table,), ("a note",)).markdown()
    assert page == (
        "`lotformer a`  \n`lotformer b`\n\nTitle\n\n| shape | two lines |\n| --- | ---: |\n| a | 1 |\n\n- a note"
    )


def test_a_row_that_misses_a_cell_is_refused():
    with pytest.raises(ValueError, match="a row has 1 cells, the table 2 columns"):
        Table("", ("a", "b"), (("1",),))


def test_without_matplotlib_the_numbers_and_the_table_are_there(no_matplotlib, tmp_path):
    said = invoke("bench", "runtime", *ARGUMENTS, "--out", str(tmp_path))
    assert "No figure: figures need matplotlib: pip install 'lotformer[figures]'" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result.json", "table.md"]


def test_a_figure_is_drawn_later_from_what_is_stored(tmp_path):
    invoke("bench", "runtime", *ARGUMENTS, "--out", str(tmp_path))
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(kept) == {"result.json", "table.md", "figure.png", "figure.svg"}
    for name in set(kept) - {"result.json"}:
        (tmp_path / name).unlink()
    invoke("render", str(tmp_path))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == kept


def test_rendering_shows_what_is_stored_and_computes_nothing(tmp_path):
    invoke("bench", "runtime", *ARGUMENTS, "--out", str(tmp_path))
    stored = json.loads((tmp_path / "result.json").read_text())
    stored["points"][0]["milliseconds"] = 777.0
    (tmp_path / "result.json").write_text(json.dumps(stored))
    assert "777" in invoke("render", str(tmp_path))
    assert "777" in (tmp_path / "table.md").read_text()


def test_a_folder_without_results_is_one_clear_error(tmp_path):
    (tmp_path / "other.json").write_text("[]")
    assert "it holds no result: expected JSON files that name their experiment" in invoke(
        "render", str(tmp_path), code=1
    )


def test_a_place_that_cannot_be_written_ends_a_benchmark_before_it_begins(tmp_path):
    (tmp_path / "file").write_text("")
    said = invoke("bench", "runtime", *ARGUMENTS, "--out", str(tmp_path / "file" / "out"), code=1)
    assert "cannot write to" in said
