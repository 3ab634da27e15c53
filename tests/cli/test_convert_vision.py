"""`lotformer convert` on checkpoints of timm: a folder or a file in, what `lotformer.conversion.load` reads out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lotformer.models  # noqa: F401  makes torchvision importable

# isort: split
import timm
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from lotformer import conversion
from lotformer.cli import app
from lotformer.conversion.hosts.sites import converted
from support.image_folder import make_image_folder

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, **SMALL)
    timm.models.save_for_hf(model, tmp_path / "checkpoint", model_args=SMALL)
    return tmp_path / "checkpoint"


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["convert", *map(str, arguments)])
    return result.exit_code, re.sub(r"\s+", " ", result.output)


def test_a_folder_of_timms_is_converted_calibrated_and_loads(checkpoint: Path, tmp_path: Path) -> None:
    images = make_image_folder(tmp_path / "images", train=2, val=0)
    out = tmp_path / "out"
    code, said = run(checkpoint, "--out", out, "--rank", 4, "--steps", 2, "--images", images)
    assert code == 0, said
    assert "2 attention layers now use 'lot'" in said
    assert 'timm.create_model("vit_tiny_patch16_224", img_size=32' in said
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "lotformer.safetensors"]
    original = timm.create_model(f"local-dir:{checkpoint}", pretrained=True)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, **SMALL)
    conversion.load(model, out / "lotformer.safetensors")
    assert len(converted(model)) == 2
    assert torch.equal(model.head.weight, original.head.weight)
    assert "exists: give --force" in run(checkpoint, "--out", out, "--steps", 0)[1]


def test_a_file_of_weights_needs_the_name_of_its_model(tmp_path: Path) -> None:
    file, out = tmp_path / "weights.safetensors", tmp_path / "out"
    save_file(timm.create_model("test_vit", num_classes=0).state_dict(), file)
    code, said = run(file, "--out", out, "--steps", 0)
    assert code == 1
    assert "--timm NAME" in said
    assert "timm knows no model 'test_vitt'" in run(file, "--timm", "test_vitt", "--out", out, "--steps", 0)[1]
    wrong = run(file, "--timm", "test_vit2", "--out", out, "--steps", 0)[1]
    assert "does not hold the weights of test_vit2" in wrong
    assert not out.exists()
    code, said = run(file, "--timm", "test_vit", "--out", out, "--steps", 0)
    assert code == 0, said
    assert "num_classes=0" in said


def test_what_is_missing_is_named(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "calibration needs images" in run(checkpoint, "--out", out)[1]
    (tmp_path / "empty").mkdir()
    assert "no images in" in run(checkpoint, "--out", out, "--images", tmp_path / "empty")[1]
    nowhere = run(tmp_path / "nowhere.pth", "--timm", "test_vit", "--out", out, "--steps", 0)[1]
    assert "neither a file of weights nor a folder of timm's" in nowhere
    (tmp_path / "broken.safetensors").write_bytes(b"broken")
    assert (
        "cannot be read as weights"
        in run(tmp_path / "broken.safetensors", "--timm", "test_vit", "--out", out, "--steps", 0)[1]
    )
