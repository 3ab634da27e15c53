"""Accuracy without patches, and the evenness of attention, of models that the ladder has trained."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import lotformer.models  # noqa: F401  registers the models

# isort: split
import timm
from torch import nn
from typer.testing import CliRunner

from lotformer.cli.main import app
from lotformer_paper.experiments.vision.robustness import evenness
from support.image_folder import make_image_folder

SIZE = {"img_size": (16, 24), "patch_size": 8, "embed_dim": 24, "depth": 2, "num_classes": 3}


def model(**options: object) -> nn.Module:
    return timm.create_model("lot_vit_half", **SIZE, **options).eval()


def test_columns_of_lot_are_even_where_those_of_softmax_are_not() -> None:
    x = torch.randn(2, 3, 16, 24)
    lot = model(attention_options={"rank": 4, "solver": "newton"})
    softmax = model(attention="softmax")
    for vit in (lot, softmax):
        for block in vit.blocks:
            nn.init.normal_(block.attn.qkv.weight)
    even, uneven = evenness(lot, x), evenness(softmax, x)
    assert even is not None
    assert uneven is not None
    assert even.deviation < 1e-3 < 0.1 < uneven.deviation
    assert even.heaviest == pytest.approx(1, abs=1e-3)
    assert uneven.heaviest > 1.1
    assert 0 < uneven.entropy < math.log(6)


def test_softmax_figures_are_those_of_its_matrix() -> None:
    x = torch.randn(2, 3, 16, 24)
    vit = timm.create_model("lot_vit_half", **{**SIZE, "depth": 1}, attention="softmax").eval()
    nn.init.normal_(vit.blocks[0].attn.qkv.weight, std=0.3)
    inputs: list[torch.Tensor] = []
    vit.blocks[0].attn.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    found = evenness(vit, x)
    q, k, _ = vit.blocks[0].attn.qkv(inputs[0]).reshape(2, 7, 3, 3, 8).permute(2, 0, 3, 1, 4)
    a = (q @ k.mT * 8**-0.5).softmax(-1)[:, :, 1:, 1:]
    columns = a.sum(-2) / a.sum(-2).mean(-1, keepdim=True)
    rows = a / a.sum(-1, keepdim=True)
    assert found is not None
    assert found.heaviest == pytest.approx(columns.amax(-1).mean().item(), rel=1e-4)
    assert found.deviation == pytest.approx(columns.std(-1, correction=0).mean().item(), rel=1e-4)
    assert found.entropy == pytest.approx(-(rows * rows.log()).sum(-1).mean().item(), rel=1e-4)


def test_attention_that_is_no_matrix_has_no_figures() -> None:
    x = torch.randn(2, 3, 16, 24)
    assert evenness(model(attention="polaformer"), x) is None
    assert evenness(model(attention="flatten"), x) is not None  # its convolution is left out


def test_the_models_of_the_ladder_are_measured(tmp_path: Path) -> None:
    data = make_image_folder(tmp_path / "images")
    ladder, out = tmp_path / "ladder", tmp_path / "out"
    words = ["--data", str(data)]
    short = ["--depth", "1", "--image-size", "16", "--rank", "4", "--batch-size", "6", "--epochs", "1", "--seeds", "1"]
    rows = ["--rows", "lot-cls-pola-dwc,polaformer"]
    trained = CliRunner().invoke(app, ["experiment", "vision-ladder", *words, *short, *rows, "--out", str(ladder)])
    assert trained.exit_code == 0, trained.output
    missing = CliRunner().invoke(
        app, ["experiment", "robustness", *words, "--ladder", str(tmp_path), "--out", str(out)]
    )
    assert missing.exit_code == 1
    assert "run `experiment vision-ladder` first" in " ".join(missing.output.split())
    result = CliRunner().invoke(app, ["experiment", "robustness", *words, "--ladder", str(ladder), "--out", str(out)])
    assert result.exit_code == 0, result.output
    stored = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    assert {one["experiment"] for one in stored} == {"robustness"}
    found = {one["cell"]["row"]: one["cell"] for one in stored}
    assert list(found) == ["lot-cls-pola-dwc", "polaformer"]
    assert all(list(one["top1"]) == ["0", "0.25", "0.5", "0.75"] for one in found.values())
    assert found["polaformer"]["evenness"] is None
    table = (out / "table.md").read_text()
    assert CliRunner().invoke(app, ["render", str(out)]).exit_code == 0
    assert (out / "table.md").read_text() == table
