"""Attention maps and clusters are what the model computes, and pictures come out of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lotformer.models  # noqa: F401  registers the models

# isort: split
import timm
from PIL import Image
from torch import nn

from lotformer.settings import make
from lotformer.training.run import train
from lotformer.vision.settings import VisionSettings
from lotformer.vision.task import Vision, open_sets
from lotformer_paper.experiments.vision import pictures
from lotformer_paper.experiments.vision.attention_maps import cls_maps, key_clusters
from support.image_folder import make_image_folder

SIZE = {"img_size": (16, 24), "patch_size": 8, "embed_dim": 24, "depth": 2, "num_classes": 3}


def model(**options: object) -> nn.Module:
    return timm.create_model("lot_vit_half", **SIZE, **options).eval()


def test_softmax_maps_are_the_softmax_of_the_scores() -> None:
    vit, x = model(attention="softmax"), torch.randn(2, 3, 16, 24)
    inputs: list[torch.Tensor] = []
    handle = vit.blocks[-1].attn.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    maps = cls_maps(vit, x)
    handle.remove()
    qkv = vit.blocks[-1].attn.qkv(inputs[0]).reshape(2, 7, 3, 3, 8).permute(2, 0, 3, 1, 4)
    expected = (qkv[0] @ qkv[1].mT * 8**-0.5).softmax(-1)[:, :, 0, 1:].mean(1)
    torch.testing.assert_close(maps, expected.reshape(2, 2, 3))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention_options": {"polarize_prefix": False}},
        {"softmax_prefix": False},
        {"attention": "polaformer"},
        {"reg_tokens": 2},
    ],
    ids=["polarised", "softmax row", "full", "another mechanism", "registers"],
)
def test_maps_are_shares_of_the_patches(options: dict[str, object]) -> None:
    maps = cls_maps(model(**options), torch.randn(2, 3, 16, 24))
    assert maps.shape == (2, 2, 3)
    assert (maps >= 0).all()
    assert (maps.sum((1, 2)) < 1).all()  # the rest was read from special tokens


def test_clusters_share_out_the_mass_of_the_patches() -> None:
    vit = model(attention_options={"rank": 4, "solver": "newton"})
    clusters = key_clusters(vit, torch.randn(2, 3, 16, 24))
    assert clusters.shape == (2, 3, 4, 2, 3)
    torch.testing.assert_close(clusters.sum(2), torch.full((2, 3, 2, 3), 1 / 6), rtol=1e-4, atol=0)
    with pytest.raises(ValueError, match="pivots belong to LOT attention; this block has SoftmaxAttention"):
        key_clusters(model(attention="softmax"), torch.randn(1, 3, 16, 24))


def test_models_without_such_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"need a ViT of lotformer\.models"):
        cls_maps(timm.create_model("resnet18"), torch.randn(1, 3, 32, 32))


def test_pictures_are_drawn_from_checkpoints(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures are drawn by matplotlib")
    folder = make_image_folder(tmp_path / "images")
    settings = make(
        VisionSettings,
        {"data": folder, "recipe": "none", "image_size": (16,), "steps": 1, "batch_size": 6,
         "model_args": ("depth=1", "patch_size=8"), "attention_args": ("rank=4",)},
    )  # fmt: skip
    train(Vision(settings, open_sets(settings)), tmp_path / "run")
    weights = tmp_path / "run" / "best.pt"
    indices = pictures.spread(folder, 2)
    checkpoints = {"a": weights, "not trained yet": tmp_path / "nothing.pt", "b": weights}
    files = pictures.draw_cls_maps("maps", checkpoints, folder, tmp_path, indices, "the command")
    files += pictures.draw_clusters(weights, folder, tmp_path, indices, "the command", pivots=2)
    assert [file.name for file in files] == ["maps.png", "maps.md", "clusters.png", "clusters.md"]
    assert Image.open(files[0]).width > 200
    about = files[1].read_text()
    assert "`the command`" in about
    assert "not trained yet" not in about
    panel = pictures.panels(tmp_path, tmp_path)["cls-maps-ranks"]
    with pytest.raises(FileNotFoundError, match=r"no weights for cls-maps-ranks.*run vision-ladder"):
        pictures.draw_cls_maps("cls-maps-ranks", panel, folder, tmp_path, indices, "")
