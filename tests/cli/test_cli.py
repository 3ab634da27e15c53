"""The command line, used as a person would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata

import pytest
import typer
from typer.testing import CliRunner

import lotformer
from lotformer.cli.main import app

runner = CliRunner()


def test_help_names_the_commands():
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in ("doctor", "figures"):
        assert command in result.output


def options(group):
    """Every option of every command: its name and the first word of its help."""
    for command in group.commands.values():
        if hasattr(command, "commands"):
            yield from options(command)
        else:
            yield from ((option.name, (getattr(option, "help", None) or "-").split()[0]) for option in command.params)


def test_commands_say_where_to_write_by_the_same_word():
    """`--out` is a folder, and nothing else is written to."""
    found = set(options(typer.main.get_command(app)))
    words = {"out", "output", "json", "file", "folder", "path", "save", "figure"}
    assert {(name, kind) for name, kind in found if name in words} == {("out", "Folder")}


def test_the_version_is_that_of_the_package():
    result = runner.invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"lotformer {lotformer.__version__}\n")
    assert lotformer.__version__ == metadata.version("lotformer")


def test_wrong_usage_is_code_2_and_names_the_option():
    result = runner.invoke(app, ["bench", "solvers", "--rnak", "3"])
    assert result.exit_code == 2
    assert "--rnak" in result.output


@pytest.mark.parametrize("command", [["experiment", "lra"], ["bench"], ["train", "lra"]], ids=" ".join)
def test_without_the_papers_part_its_commands_say_what_to_install(command):
    alone = "import importlib.metadata as m; m.entry_points = lambda **_: (); from lotformer.cli.main import app; app()"
    done = subprocess.run([sys.executable, "-c", alone, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install lotformer-paper" in done.stderr


def test_commands_of_other_distributions_join_ours(tmp_path):
    (tmp_path / "greeting.py").write_text("def hello() -> None:\n    print('good morning')\n")
    about = tmp_path / "greeting-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: greeting\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        "[lotformer.commands]\nhello = greeting:hello\ntrain.hello = greeting:hello\nlost = nowhere:x\n"
    )

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "lotformer", *words]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path}
        )

    assert run("hello").stdout == run("train", "hello").stdout == "good morning\n"
    lost = run("lost")
    assert lost.returncode == 1
    assert "greeting 1 cannot be loaded: No module named 'nowhere'" in lost.stderr


def test_ctrl_c_is_code_130(monkeypatch, tmp_path):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lotformer_paper.bench.solvers.run", interrupt)
    assert runner.invoke(app, ["bench", "solvers", "--out", str(tmp_path)]).exit_code == 130


def test_doctor_tells_versions_devices_and_backends():
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 0
    for word in ("torch", "Devices", "reference", "transport", "window", "key masses", "triton: "):
        assert word in result.output


def test_the_coupling_figure_is_drawn_and_its_residuals_are_small(tmp_path):
    result = runner.invoke(app, ["figures", "coupling", "--out", str(tmp_path), "--points", "6"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "coupling.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "<svg" in (tmp_path / "coupling.svg").read_text()
    assert "residual" in result.output


@pytest.mark.parametrize("module", ["timm", "transformers", "matplotlib", "typer"])
def test_importing_the_package_does_not_import_heavy_extras(module):
    code = f"import sys, lotformer; sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def commands(group, path=()):
    for name, command in group.commands.items():
        yield from commands(command, (*path, name)) if hasattr(command, "commands") else [(*path, name)]


@pytest.mark.parametrize("path", commands(typer.main.get_command(app)), ids=" ".join)
def test_help_is_readable_at_eighty_columns(path):
    """No word and no default is cut off."""
    result = runner.invoke(app, [*path, "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    cut = [line for line in result.output.splitlines() if re.search(r"\S…", line.replace("A,B,…", ""))]
    assert not cut
