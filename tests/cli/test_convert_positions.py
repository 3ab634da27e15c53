"""`lotformer convert` for longer texts, and into the folder one is in."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import transformers
from typer.testing import CliRunner

from lotformer.cli.main import app
from support.small_models import SMALL


@pytest.fixture
def checkpoint(tmp_path):
    SMALL["bert"].build().save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def test_positions_are_extended_on_request(checkpoint, tmp_path):
    out = tmp_path / "long"
    asked = ["convert", str(checkpoint), "--out", str(out), "--steps", "0", "--max-positions", "100"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert "the 40 positions it has learned are interpolated" in done.output
    assert transformers.AutoModel.from_pretrained(out).config.max_position_embeddings == 100


def test_the_folder_one_is_in(checkpoint, tmp_path):
    (tmp_path / "here").mkdir()
    command = [sys.executable, "-m", "lotformer", "convert", str(checkpoint), "--out", ".", "--steps", "0"]
    done = subprocess.run(command, cwd=tmp_path / "here", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "config.json" in os.listdir(tmp_path / "here")
