"""Table 1: ImageNet-1K, or any set in the same folders, with the paper's backbones × mechanisms.

A cell is one model with one seed, trained by as many processes as a launcher starts:

    torchrun --nproc-per-node 8 -m lotformer experiment imagenet --data imagenet --workers 12
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lotformer import attention
from lotformer.cli.tables import Table, mean_and_deviation
from lotformer.cli.terminal import Listener
from lotformer.data.folder import VARIABLE
from lotformer.settings import Settings, make, setting
from lotformer.vision.settings import Recipe, VisionSettings, completed
from lotformer.vision.task import open_sets

from ...results.cells import Origin, Record
from ...results.paper import BACKBONES, MECHANISMS, TABLE_1
from ...results.report import largest
from ...results.sources import Source
from ..engine import Experiment, Job, alike, names_among
from .ablation import Seeds, by_row, images_folder, top1
from .training import Cell, train_row

IMAGES = "imagenet"
MODELS = {title.lower(): model for model, title in BACKBONES.items()}
"""The backbones by the names that cells carry."""


@dataclass(frozen=True)
class ImageNetSettings(Settings):
    """How long and how each model is trained; what is not given is the recipe's."""

    recipe: Recipe = setting("paper", "Whose training: the paper's 400 epochs, DeiT's 300, or none on crops and flips.")
    epochs: float | None = setting(None, "Passes over the training set; the warm-up shrinks with them.", at_least=0)
    steps: int | None = setting(None, "Updates, in place of epochs; without a warm-up.", at_least=1)
    batch_size: int | None = setting(None, "Images per update, over all processes.", at_least=1)
    accumulate: int = setting(1, "Batches that each update is split into, to save memory.", at_least=1)
    lr: float | None = setting(None, "Peak learning rate, for the batch as it is.", at_least=0)
    image_size: int = setting(224, "Side of the images in pixels.", at_least=1)
    precision: Literal["fp32", "bf16"] = setting("fp32", "Of activations; weights stay in fp32.")
    cache: bool = setting(False, "Decode all images once and keep them in memory; for small sets.")
    workers: int = setting(0, "Processes that load data, per training process.", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs is not None and self.steps is not None:
            raise ValueError(f"give epochs or steps, got {self.epochs:g} epochs and {self.steps} steps.")

    def vision(self, model: str, mechanism: str, seed: int, data: Path) -> VisionSettings:
        """The training of one model."""
        given = {name: getattr(self, name) for name in ("epochs", "steps", "batch_size", "lr")}
        shared = {name: getattr(self, name) for name in ("recipe", "accumulate", "precision", "cache", "workers")}
        of_row: dict[str, Any] = {"model": model, "attention": mechanism, "seed": seed, "data": data}
        chosen = {name: value for name, value in given.items() if value is not None}
        return make(VisionSettings, completed({**shared, **of_row, **chosen, "image_size": (self.image_size,)}))


Data = Annotated[
    Path | None,
    typer.Option(
        help=f"Folder that holds train/ and val/ with one folder per class; by default {IMAGES} in ${VARIABLE}.",
        show_default=False,
    ),
]
Backbones = Annotated[
    str | None, typer.Option(help=f"Backbones, comma-separated; by default all: {', '.join(MODELS)}.")
]
Mechanisms = Annotated[
    str | None, typer.Option(help="Mechanisms, comma-separated, any of `lotformer zoo`; by default the paper's rows.")
]


def plan(
    settings: ImageNetSettings,
    listen: Listener,
    data: Data = None,
    backbones: Backbones = None,
    mechanisms: Mechanisms = None,
    seeds: Seeds = 1,
) -> Iterator[Job]:
    """A job for every model and seed, all models with one seed before the next."""
    folder = images_folder(data, IMAGES)
    rows = list(_rows(names_among(backbones, MODELS), mechanisms))
    sets = open_sets(settings.vision(*rows[0], 0, folder), listen)
    source = Source(folder.name, hashlib.sha256(sets.described().encode()).hexdigest())
    for seed, (model, mechanism) in itertools.product(range(seeds), rows):
        vision = settings.vision(model, mechanism, seed, folder)
        row = _slug(model, mechanism)
        make = partial(train_row, row, vision, lambda: sets, listen, timed=False)
        yield Job({f"{row}-seed{seed}": Origin(vision.described(), {"images": source})}, make, seed)


def _rows(backbones: list[str], mechanisms: str | None) -> Iterator[tuple[str, str]]:
    """Models and mechanisms: the paper's rows, or the product of what is given."""
    given = None if mechanisms is None else names_among(mechanisms, attention.names())
    for model in map(MODELS.__getitem__, backbones):
        yield from ((model, name) for name in given or [row.attention for row in TABLE_1 if row.backbone == model])


def _slug(model: str, mechanism: str) -> str:
    return f"{BACKBONES[model].lower()}/{mechanism}"


def _arranged(records: list[Record]) -> list[Record]:
    """Backbones and mechanisms in the paper's order, then by name."""
    order = [_slug(row.backbone, row.attention) for row in TABLE_1]
    backbones = list(MODELS)

    def place(record: Record) -> tuple[Any, ...]:
        row, backbone = record.cell.row, record.cell.row.partition("/")[0]
        return backbones.index(backbone), order.index(row) if row in order else len(order), row, record.cell.seed

    return sorted(records, key=place)


def _tables(records: list[Record]) -> list[Table]:
    """A table for every backbone, the paper's top-1 beside ours."""
    columns = (
        "attention", "top-1 %", "paper's\ntop-1 %", "top-5 %", "seeds", "M para-\nmeters", "hours", "images/s",
        "column\nresidual",
    )  # fmt: skip
    printed = {_slug(row.backbone, row.attention): row.top1 for row in TABLE_1}
    found, tables = by_row(records), []
    for model, title in BACKBONES.items():
        rows = []
        for slug, made in found.items():
            backbone, _, mechanism = slug.partition("/")
            if MODELS[backbone] != model:
                continue
            cells: list[Cell] = [record.cell for record in made]
            minutes = [cell.minutes for cell in cells if cell.minutes is not None]
            rows.append(
                (
                    MECHANISMS.get(mechanism, mechanism),
                    top1(made),
                    printed.get(slug, "–"),
                    mean_and_deviation([cell.top5 for cell in cells], 100),
                    str(len(cells)),
                    f"{cells[0].parameters / 1e6:.2f}",
                    f"{sum(minutes) / len(minutes) / 60:.1f}" if minutes else "–",
                    f"{sum(cell.images_per_second for cell in cells) / len(cells):.0f}",
                    largest(cell.residual for cell in cells),
                )
            )
        if rows:
            tables.append(Table(title, columns, tuple(rows)))
    return tables


def _notes(records: list[Record]) -> Iterable[str]:
    return [
        *alike(records, _budget),
        "Accuracy on the validation images after the last step; mean ± standard deviation where there are several "
        "seeds. The paper's is on ImageNet-1K after 400 epochs.",
        "Hours are of runs that were not interrupted; images per second are those of all processes together.",
        "Column residual: how far the worst column of any LOT layer is from the sum imposed on it, relative, on one "
        "batch.",
        *alike(records, lambda record: f"{record.provenance.where()}."),
    ]


def _budget(record: Record) -> str:
    s, cell = record.origin.settings, record.cell
    recipe = "No recipe, random crops and flips" if s["recipe"] == "none" else f"Recipe {s['recipe']!r}"
    height, width = s["image_size"][0], s["image_size"][-1]
    size = f"{height} px" if height == width else f"{height} × {width} px"
    return (
        f"{recipe}: {cell.epochs:g} epochs of {record.origin.sources['images'].name} at {size} ({cell.steps:,} steps "
        f"of {s['batch_size']} images), peak lr {s['lr']:g}, {s['precision']}."
    )


EXPERIMENT = Experiment(
    name="imagenet",
    about="Table 1: accuracy of the paper's backbones × mechanisms on ImageNet-1K, or any set in such folders.",
    settings=ImageNetSettings,
    cell=Cell,
    plan=plan,
    arranged=_arranged,
    tables=_tables,
    notes=_notes,
    extras=("train",),
    processes=True,
)
