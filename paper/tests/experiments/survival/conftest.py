"""A tiny vision transformer as a file of weights, and a folder of images by class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file


@pytest.fixture
def images(tmp_path) -> Path:
    rng = np.random.default_rng(0)
    for label in range(5):
        place = tmp_path / "images" / str(label)
        place.mkdir(parents=True)
        for index in range(3):
            pixels = rng.normal(40 * label + 40, 25, (64, 64, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(place / f"{index}.png")
    return tmp_path / "images"


@pytest.fixture
def checkpoint(tmp_path, monkeypatch) -> Path:
    torch.manual_seed(0)
    create = timm.create_model
    small = {"embed_dim": 24, "num_heads": 3, "depth": 2}
    monkeypatch.setattr(timm, "create_model", lambda name, **options: create(name, **small, **options))
    save_file(timm.create_model("vit_tiny_patch16_224", num_classes=0).state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"
