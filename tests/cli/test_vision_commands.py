"""Training, evaluating and the ablations from the command line, on generated images."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lotformer.cli.main import app
from support.image_folder import make_image_folder

SMALL = ["--model", "lot_vit_half", "--model-args", "depth=1,patch_size=8", "--image-size", "16"]


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def fail(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 1, result.output
    return " ".join(result.output.split())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_image_folder(tmp_path / "images")


def test_train_then_evaluate(folder: Path, tmp_path: Path) -> None:
    (folder / "train" / "dark" / "0.png").write_bytes(b"broken")
    train = ["train", "vision", "--data", folder, *SMALL, "--batch-size", "6", "--steps", "4"]
    told = run(*train, "--out", tmp_path / "run")
    assert "4 steps in" in told
    assert "1 images could not be decoded and were skipped: dark/0.png" in told
    assert "holds a run already" in fail(*train, "--out", tmp_path / "run")
    told = run("eval", "vision", "--checkpoint", tmp_path / "run" / "best.pt", "--data", folder, "--drop", "0.5")
    for part in ("top-1", "top-5", "50% of patches blank", "images per second", "blocks.0.attn.mechanism"):
        assert part in told
    assert "expects shares between 0 and 1" in fail(
        "eval", "vision", "--checkpoint", tmp_path / "run" / "best.pt", "--data", folder, "--drop", "half"
    )


def test_a_fresh_process_can_train(folder: Path, tmp_path: Path) -> None:
    """Nothing that other tests have imported makes timm importable here."""
    code = "from lotformer.cli.main import app; app()"
    words = [
        "train",
        "vision",
        "--data",
        folder,
        *SMALL,
        "--batch-size",
        "6",
        "--steps",
        "1",
        "--out",
        tmp_path / "run",
    ]
    done = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_missing_folder_is_one_line(tmp_path: Path) -> None:
    told = fail("train", "vision", "--data", tmp_path / "nowhere", "--out", tmp_path / "run")
    assert "does not exist: --data expects a folder that holds train/ and val/." in told


def test_an_ablation_runs_once_and_renders_from_its_cells(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "ladder"
    budget = ["--depth", "1", "--image-size", "16", "--epochs", "0.5", "--batch-size", "6", "--rank", "4"]
    command = ["experiment", "vision-ladder", "--data", folder, "--out", out, "--rows", "lot-cls,softmax", *budget]
    told = run(*command, "--seeds", "2")
    assert "LOT, [CLS] reads by softmax" in told
    assert "±" in (out / "table.md").read_text()
    cells = sorted(out.glob("*.json"))
    assert [cell.stem for cell in cells] == ["lot-cls-seed0", "lot-cls-seed1", "softmax-seed0", "softmax-seed1"]
    before = {cell: cell.stat().st_mtime_ns for cell in cells}
    run(*command, "--seeds", "2")
    assert {cell: cell.stat().st_mtime_ns for cell in cells} == before
    record = json.loads(cells[0].read_text())
    assert record["cell"]["residual"] is not None
    assert record["provenance"]["budget"] == {"steps": 2, "epochs": 0.5}
    run("render", out)
    assert "made from something else" in fail(*command, "--lr", "0.01")


@pytest.mark.parametrize(
    ("experiment", "row", "shown"),
    [("sinkhorn-ablation", "fixed-eps0.1-newton", "exact"), ("rank-ablation", "r8", "r = 8")],
)
def test_the_other_ablations(folder: Path, tmp_path: Path, experiment: str, row: str, shown: str) -> None:
    budget = ["--depth", "1", "--image-size", "16", "--epochs", "0.5", "--batch-size", "6", "--rank", "4"]
    told = run("experiment", experiment, "--data", folder, "--out", tmp_path / "out", "--rows", row, *budget)
    assert shown in told
    assert "'nothing' is not one of " in fail("experiment", experiment, "--data", folder, "--rows", "nothing")
