"""LrOT ≤ LOT: costs of couplings, on heads where they can be told by hand and on trained ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lotformer.models  # noqa: F401  registers the models

# isort: split
import timm
from torch import nn
from typer.testing import CliRunner

from lotformer.cli.main import app
from lotformer_paper.experiments import engine
from lotformer_paper.experiments.vision.ablation import AblationSettings
from lotformer_paper.experiments.vision.gap import EXPERIMENT, GapSettings, layers
from lotformer_paper.experiments.vision.ladder import EXPERIMENT as LADDER
from support.image_folder import make_image_folder

SIZE = {"img_size": (16, 24), "patch_size": 8, "embed_dim": 24, "depth": 2, "num_classes": 3}
SHORT = GapSettings(images=2, outer_steps=20, inner_steps=20)


def model(**options: object) -> nn.Module:
    made = timm.create_model("lot_vit_half", **SIZE, attention_options={"rank": 4, "solver": "newton", **options})
    for block in made.blocks:
        nn.init.normal_(block.attn.qkv.weight, std=0.5)
    return made


def test_the_order_is_that_of_the_proposition() -> None:
    torch.manual_seed(0)
    for layer in layers(model(), 3 * torch.randn(2, 3, 16, 24), SHORT):
        assert layer.lot_residual < 1e-4
        assert layer.lowest <= layer.lowrank + 1e-6
        assert layer.lowest < layer.lot
        assert layer.lowrank_objective < layer.lot_objective
        assert layer.holds > 0.5
        assert layer.holds_at_zero == 1


def test_pivots_that_are_equal_couple_independently() -> None:
    vit = model()
    for block in vit.blocks:
        nn.init.zeros_(block.attn.mechanism.pivots.points.bias)
    for layer in layers(vit, torch.randn(1, 3, 16, 24), SHORT):
        assert layer.lot == pytest.approx(layer.independent, abs=1e-5)


@pytest.mark.parametrize("options", [{"balance": "none"}, {"key_masses": "linear"}], ids=["unbalanced", "masses"])
def test_other_marginals_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="must couple all tokens with uniform masses"):
        layers(model(**options), torch.randn(1, 3, 16, 24), SHORT)
    with pytest.raises(ValueError, match="holds no LOT attention"):
        layers(timm.create_model("lot_vit_half", **SIZE, attention="softmax"), torch.randn(1, 3, 16, 24), SHORT)


def test_a_model_of_the_ladder_is_measured_once(tmp_path: Path) -> None:
    data, ladder, out = make_image_folder(tmp_path / "images", train=6, val=2), tmp_path / "ladder", tmp_path / "out"
    short = AblationSettings(depth=1, image_size=16, rank=4, batch_size=6, epochs=1)
    engine.run(LADDER, short, ladder, data=data, seeds=1, rows="lot-cls")
    words = ["--checkpoint", str(ladder / "runs/lot-cls-seed0/best.pt"), "--data", str(data), "--out", str(out)]
    command = ["experiment", EXPERIMENT.name, *words, "--images", "2", "--outer-steps", "4", "--inner-steps", "4"]
    for _ in range(2):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
    [table] = engine.render(out).tables
    assert table.title == "⟨C, Γ⟩ on 2 images: lot-cls-seed0"
    assert [row[:3] for row in table.rows] == [("blocks.0.attn.mechanism", "4", "1")]
    missing = CliRunner().invoke(app, [*command[:2], "--checkpoint", str(tmp_path / "no.pt"), "--out", str(out)])
    assert "there is no checkpoint" in missing.output
