"""A small set of generated images in folders: classes differ in brightness, so a model can learn them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("dark", "grey", "white")


def make_image_folder(folder: Path, train: int = 8, val: int = 4, size: tuple[int, int] = (20, 24)) -> Path:
    """`folder/{train,val}/<class>/<number>.png`, so many per class."""
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for label, name in enumerate(CLASSES):
            place = folder / split / name
            place.mkdir(parents=True)
            for index in range(count):
                pixels = rng.normal(50 + 70 * label, 25, (*size, 3)).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(place / f"{index}.png")
    return folder
