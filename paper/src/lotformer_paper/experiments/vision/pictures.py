"""Figure 2, what [CLS] reads in each model, and the soft clusters of the pivots, drawn over images."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lotformer.data.vision.sources import open_images
from lotformer.data.vision.transforms import evaluation_transform
from lotformer.files import write_bytes, write_text
from lotformer.vision.build import Trained, load_trained
from lotformer.vision.task import normalisation

from ...results.figures import pyplot
from .attention_maps import cls_maps, key_clusters

_FRAME = (0.0, 1.0, 1.0, 0.0)
RANKS = ("r4", "r8", "r16", "r32")


def run_weights(folder: Path, row: str, seed: int = 0) -> Path:
    """The weights of a cell, as an ablation has left them."""
    return folder / "runs" / f"{row}-seed{seed}" / "best.pt"


def panels(ladder: Path, ranks: Path) -> dict[str, dict[str, Path]]:
    """Both panels of Figure 2, from the folders of `vision-ladder` and `rank-ablation`: checkpoints by title."""
    left = {"softmax": run_weights(ladder, "softmax")}
    left |= {f"r = {row[1:]}": run_weights(ranks, row) for row in RANKS}
    titles = {"all tokens coupled": "lot-full", "[CLS] by softmax": "lot-cls", "… and polarised": "lot-cls-pola"}
    return {"cls-maps-ranks": left, "cls-maps-treatments": {t: run_weights(ladder, row) for t, row in titles.items()}}


def draw_cls_maps(
    name: str, checkpoints: Mapping[str, Path], data: Path, out: Path, images: Sequence[int], command: str
) -> list[Path]:
    """A picture with a row for each image and a column for each model, and a page that says how it was made.

    Models that are not trained yet are left out.

    Raises:
        FileNotFoundError: none is.
    """
    models = {title: load_trained(path) for title, path in checkpoints.items() if path.is_file()}
    if not models:
        where = next(iter(checkpoints.values()))
        raise FileNotFoundError(f"no weights for {name}, e.g. {where}: run vision-ladder and rank-ablation first.")
    shown = _Shown(data, images, next(iter(models.values())))
    maps = {title: cls_maps(trained.model, shown.pixels) for title, trained in models.items()}
    plt = pyplot()
    figure, axes = plt.subplots(
        len(images), 1 + len(models), figsize=(1.35 * (1 + len(models)), 1.4 * len(images) + 0.25), squeeze=False
    )
    for row, photo in enumerate(shown.photos):
        _show(axes[row, 0], photo)
        for column, heat in enumerate(maps.values(), start=1):
            _overlay(axes[row, column], photo, heat[row])
    for axis, title in zip(axes[0], ("image", *models), strict=True):
        axis.set_title(title, fontsize=9)
    picture = _save(figure, out / f"{name}.png")
    return [
        picture,
        _about(
            name,
            command,
            models,
            out,
            "What [CLS] reads in the last block, mean over heads; every map from zero to its own largest value.",
        ),
    ]


def draw_clusters(
    checkpoint: Path, data: Path, out: Path, images: Sequence[int], command: str, *, head: int = 0, pivots: int = 6
) -> list[Path]:
    """For each image: which pivot sends most to each patch, and the maps of the pivots that are sharpest."""
    trained = load_trained(checkpoint)
    shown = _Shown(data, images, trained)
    clusters = key_clusters(trained.model, shown.pixels)[:, head]  # (B, R, rows, columns)
    rank = clusters.shape[1]
    sharpest = clusters.flatten(2).amax(2).div(clusters.flatten(2).sum(2)).mean(0).argsort(descending=True)[:pivots]
    plt = pyplot()
    columns = 2 + len(sharpest)
    figure, axes = plt.subplots(len(images), columns, figsize=(1.35 * columns, 1.4 * len(images) + 0.25), squeeze=False)
    for row, photo in enumerate(shown.photos):
        _show(axes[row, 0], photo)
        strongest = clusters[row].argmax(0).numpy()
        _show(axes[row, 1], _grey(photo))
        _lay(axes[row, 1], strongest, "turbo", rank - 1)
        for column, pivot in enumerate(sharpest.tolist(), start=2):
            _overlay(axes[row, column], photo, clusters[row, pivot])
    titles = ("image", "strongest pivot", *(f"pivot {pivot}" for pivot in sharpest.tolist()))
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title, fontsize=9)
    picture = _save(figure, out / "clusters.png")
    told = (
        f"Mass that pivots send to patches in the last block, head {head}. Of {rank} pivots the sharpest are shown, "
        "each from zero to its own largest value."
    )
    return [picture, _about("clusters", command, {"model": trained}, out, told)]


def spread(data: Path, count: int) -> list[int]:
    """Indices of so many validation images at equal distances: of different classes, which follow one another."""
    length = len(open_images("", data, "validation"))
    return [(2 * i + 1) * length // (2 * count) for i in range(count)]


class _Shown:
    """Validation images as a model sees them `(B, 3, H, W)`, and as photographs `(H, W, 3)` in [0, 1]."""

    def __init__(self, data: Path, indices: Sequence[int], trained: Trained) -> None:
        s = trained.settings
        images = open_images("", data, s.val_split)
        state = normalisation(s)
        transform = evaluation_transform(s.size, s.crop, **state)
        chosen = [images[index][0] for index in indices]
        self.pixels = torch.stack([transform(image) for image in chosen])
        mean, deviation = (torch.tensor(state[name]).view(3, 1, 1) for name in ("mean", "std"))
        sharp = evaluation_transform((160, 160), s.crop, **state)
        self.photos = [(sharp(image) * deviation + mean).clamp(0, 1).permute(1, 2, 0).numpy() for image in chosen]


def _overlay(axis: Any, photo: np.ndarray, heat: Tensor) -> None:
    """A map over the grey photograph, from nothing to its own largest value."""
    _show(axis, _grey(photo))
    _lay(axis, (heat / heat.max().clamp_min(1e-12)).numpy(), "inferno", 1)


def _lay(axis: Any, values: np.ndarray, colours: str, most: float) -> None:
    axis.imshow(values, extent=_FRAME, cmap=colours, vmin=0, vmax=most, alpha=0.6, interpolation="nearest")


def _grey(photo: np.ndarray) -> np.ndarray:
    """A pale background of equal contrast for all maps."""
    return np.repeat(0.3 + 0.6 * photo.mean(2, keepdims=True), 3, 2)


def _show(axis: Any, photo: np.ndarray) -> None:
    axis.imshow(photo, extent=_FRAME)
    axis.set_axis_off()


def _save(figure: Any, path: Path) -> Path:
    from PIL import Image

    drawn, small = io.BytesIO(), io.BytesIO()
    figure.tight_layout(pad=0.3)
    figure.savefig(drawn, format="png", dpi=100)
    pyplot().close(figure)
    Image.open(drawn).convert("RGB").quantize(256).save(small, format="png", optimize=True)  # a third of the size
    write_bytes(small.getvalue(), path)
    return path


def _about(name: str, command: str, models: Mapping[str, Trained], out: Path, what: str) -> Path:
    lines = [f"`{command}`", "", what, "", "| model | steps | top-1 % |", "| --- | ---: | ---: |"]
    lines += [f"| {title} | {t.step} | {100 * t.metrics['top1']:.1f} |" for title, t in models.items()]
    path = out / f"{name}.md"
    write_text("\n".join(lines) + "\n", path)
    return path
