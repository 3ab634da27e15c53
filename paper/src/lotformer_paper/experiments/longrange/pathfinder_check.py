"""Pathfinder under scrutiny: a contact sheet, and what an image tells without following a contour."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lotformer.cli.tables import Table
from lotformer.cli.terminal import Listener
from lotformer.settings import Settings, setting

from ...data.longrange.pathfinder import Pathfinder
from ...data.longrange.statistics import dot_distance, image_statistics
from ...results import figures
from ...results.cells import Origin, Record
from ..engine import Cells, Experiment, Job, described

_CELL = "pathfinder"
_ROWS, _PER_ROW = 4, 12


@dataclass(frozen=True)
class PathfinderSettings(Settings):
    """The number of images."""

    images: int = setting(12_000, "Images; two thirds to learn from, the rest to judge by.", at_least=600)
    seed: int = setting(0, "Of the generator.", at_least=0)


@dataclass(frozen=True)
class Reading:
    """Accuracy of a logistic regression from some statistics of an image to its label, on images it has not seen."""

    features: str
    count: int
    accuracy: float


@dataclass(frozen=True)
class Cell:
    """`sheet` holds the first images of label 1 and of label 0 for the contact sheet, their pixels in hexadecimal."""

    images: int
    positive: float
    readings: tuple[Reading, ...]
    sheet: tuple[str, ...]


def plan(settings: PathfinderSettings, listen: Listener) -> list[Job]:
    """One cell."""
    return [Job({_CELL: Origin(described(settings), {})}, partial(_look, settings, listen), settings.seed)]


def _look(settings: PathfinderSettings, listen: Listener, cells: Cells) -> None:
    """Draw the images and try to read their labels off whole-image statistics."""
    images, labels = _drawn(settings, listen)
    whole, distance = image_statistics(images), dot_distance(images)
    features = {
        "brightness: mean, deviation, histogram, quadrants": np.delete(whole, np.r_[2, 11:20], 1),
        "length: lit pixels, by number of lit neighbours": whole[:, np.r_[2, 11:20]],
        "both": whole,
        "distance between the dots": np.stack([distance, distance**2], 1),
    }
    readings = tuple(
        Reading(name, values.shape[1], _accuracy(values, labels, settings.seed)) for name, values in features.items()
    )
    half = _ROWS // 2 * _PER_ROW
    shown = np.concatenate([images[labels == label][:half] for label in (1, 0)])
    sheet = tuple(image.tobytes().hex() for image in shown)
    cells.finish(_CELL, Cell(len(images), float(labels.mean()), readings, sheet), {"images": len(images)})


def _drawn(settings: PathfinderSettings, listen: Listener) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    source = Pathfinder(seed=settings.seed, sizes={"train": settings.images})
    shards, count = [], source.shards()["train"]
    for number in range(count):
        listen("drawing", number, count)
        shards.append(source.make("train", number))
    images = np.stack([image for shard in shards for image in shard.documents]).reshape(-1, 32, 32)
    return images, np.concatenate([shard.labels for shard in shards])


def _accuracy(features: npt.NDArray[np.float64], labels: npt.NDArray[np.uint8], seed: int) -> float:
    try:
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
    except ImportError as error:
        raise ImportError("a logistic regression needs scikit-learn: pip install scikit-learn.") from error

    learned = len(labels) * 2 // 3
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000, random_state=seed))
    return float(model.fit(features[:learned], labels[:learned]).score(features[learned:], labels[learned:]))


def _tables(records: list[Record]) -> list[Table]:
    """Accuracy of each kind of statistics in telling the label."""
    readings = records[0].cell.readings
    rows = tuple((reading.features, str(reading.count), f"{100 * reading.accuracy:.1f}") for reading in readings)
    return [Table("What a logistic regression reads off an image", ("statistics", "number", "accuracy, %"), rows)]


def _notes(records: list[Record]) -> list[str]:
    cell = records[0].cell
    judged = cell.images - cell.images * 2 // 3
    return [
        f"{cell.images:,} images, {100 * cell.positive:.1f} % of them positive; judged on {judged:,} that were not "
        f"learned from, so chance is 50 ± {100 * (0.25 / judged) ** 0.5:.1f} %.",
        "The dots of a pair lie at other distances on one contour than on two; that is in the published stimulus too.",
        f"{records[0].provenance.where()}.",
    ]


def _draw(records: list[Record], folder: Path) -> list[Path]:
    """The contact sheet: label 1 above, label 0 below."""
    plt: Any = figures.pyplot()
    cells = np.full((_ROWS, _PER_ROW, 34, 34), 255, np.uint8)  # with a white line around each
    for cell, pixels in zip(cells.reshape(-1, 34, 34), records[0].cell.sheet, strict=True):
        cell[1:-1, 1:-1] = np.frombuffer(bytes.fromhex(pixels), np.uint8).reshape(32, 32)
    figure, axis = plt.subplots(figsize=(_PER_ROW, _ROWS + 0.4), layout="constrained")
    axis.imshow(cells.transpose(0, 2, 1, 3).reshape(_ROWS * 34, -1), cmap="gray", interpolation="nearest")
    axis.set_axis_off()
    axis.set_title("Rows 1 and 2: one contour joins the dots. Rows 3 and 4: the dots lie on two contours.", fontsize=10)
    return figures.save(figure, folder / "contact_sheet", dpi=110)


EXPERIMENT = Experiment(
    name="pathfinder",
    about="Look at generated Pathfinder images, and at what their statistics tell of the label.",
    settings=PathfinderSettings,
    cell=Cell,
    plan=plan,
    tables=_tables,
    notes=_notes,
    draw=_draw,
    extras=("train",),
)
