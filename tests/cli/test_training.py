"""Training on a terminal: what is shown, how it ends, and what signals do to it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from lotformer.cli.settings import with_settings
from lotformer.cli.training import train_with_progress
from support.torture import ToySettings, ToyTask

app = typer.Typer()


@app.command()
@with_settings(ToySettings)
def toy(
    settings: ToySettings,
    out: Annotated[Path, typer.Option(help="Folder.")],
    resume: Annotated[bool, typer.Option(help="Go on with the run in the folder.")] = False,
) -> None:
    """Train a toy."""
    train_with_progress(ToyTask(settings), out, resume=resume)


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "120"})
    return result.exit_code, re.sub(r"\s+", " ", result.output)


def test_every_setting_is_an_option_or_in_a_file_and_the_end_says_where_the_time_went(tmp_path):
    (tmp_path / "toy.toml").write_text("steps = 6\nprofile_every = 2\nlr = 0.5\n")
    code, said = run("--config", tmp_path / "toy.toml", "--lr", 0.01, "--out", tmp_path / "out")
    assert code == 0, said
    assert "6 steps in" in said
    assert re.search(r"data \d+ %, attention \d+ %, rest \d+ %", said)
    assert re.search(r"best accuracy 0\.\d+ at step 6", said)


def test_what_cannot_work_is_one_line(tmp_path):
    arguments = ["--steps", 2, "--out", tmp_path / "out"]
    assert run(*arguments)[0] == 0
    code, said = run(*arguments)
    assert code == 1
    assert "Cannot train: " in said
    assert "holds a run already" in said
    code, said = run(*arguments, "--resume", "--lr", 0.5)
    assert code == 1
    assert "settings.lr is 0.5 here and 0.001 there" in said


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_whole_group_saves_and_ends_with_its_exit_code(number, code, tmp_path):
    arguments = ["--steps", "1000000", "--workers", "1", "--save-every", "1000000", "--out", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, __file__, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},  # it imports what tests share
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    while not (tmp_path / "log.jsonl").exists() or not (tmp_path / "log.jsonl").read_text():
        assert process.poll() is None, process.communicate()[0]
    os.killpg(process.pid, number)  # as a terminal does: to the process and what it has started
    said, _ = process.communicate()
    assert process.returncode == code, said
    assert (tmp_path / "last.pt").exists()
    assert "Traceback" not in said


if __name__ == "__main__":
    app()
