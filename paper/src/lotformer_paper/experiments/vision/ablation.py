"""The base of the vision ablations: rows of one table, each a small model trained with the same budget.

A cell is one row with one seed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lotformer.cli.tables import Table, mean_and_deviation
from lotformer.cli.terminal import Listener
from lotformer.data.folder import VARIABLE, data_folder
from lotformer.settings import Settings, setting
from lotformer.vision import settings as vision_settings
from lotformer.vision.settings import VisionSettings
from lotformer.vision.task import open_sets

from ...results.cells import Origin, Record
from ...results.sources import Source, folder_source
from ..engine import Experiment, Job, alike, described, names_among
from .training import Cell, train_row

Found = dict[str, list[Record]]
"""The finished cells of each row."""

IMAGES = "imagenette2-128"
Images = Annotated[
    Path | None,
    typer.Option(
        help=f"Folder that holds train/ and val/ with one folder per class; by default {IMAGES} in ${VARIABLE}.",
        show_default=False,
    ),
]
Seeds = Annotated[int, typer.Option(min=1, help="Times to train each row, each with another seed.")]
Rows = Annotated[str | None, typer.Option(help="Rows to run, comma-separated; by default all.")]


@dataclass(frozen=True)
class AblationSettings(Settings):
    """The budget of every cell. The defaults are a short one that a laptop finishes; the table says so."""

    recipe: Literal["short", "paper"] = setting(
        "short",
        "Whose training: a short one on crops and flips, or the paper's, with its augmentation, optimizer and schedule "
        "and, where nothing else is given, its model, size, batch and 400 epochs.",
    )
    model: str = setting("lot_vit_half", "A model of lotformer.models with one size of patches.")
    depth: int = setting(4, "Blocks of the model.", at_least=1)
    patch_size: int = setting(8, "Side of a patch in pixels.", at_least=1)
    image_size: int = setting(64, "Side of the images in pixels.", at_least=1)
    rank: int = setting(16, "Pivots of LOT, where the table does not vary them.", at_least=1)
    epochs: float = setting(2.0, "Passes over the training set.", at_least=0)
    batch_size: int = setting(64, "Images per step.", at_least=1)
    lr: float = setting(1e-3, "Peak learning rate, for the batch as it is.", at_least=0)
    crop_scale: float = setting(0.35, "Smallest share of the image that a random crop keeps.", at_least=0.01)
    cache: bool = setting(True, "Decode all images once and keep them in memory; not for large sets.")
    workers: int = setting(0, "Processes that load data, per training process.", at_least=0)


@dataclass(frozen=True)
class Row:
    """A row of a table: a mechanism with its options, and options of the model."""

    attention: str = "lot"
    options: Mapping[str, Any] = field(default_factory=dict)
    model_options: Mapping[str, Any] = field(default_factory=dict)


def ablation(
    name: str,
    about: str,
    rows: Mapping[str, Row],
    tables: Callable[[Found], Sequence[Table]],
    notes: Sequence[str],
    *,
    paper_model: str = "lot_deit_tiny_patch16_224",
    order: Iterable[str] = (),
    seeds: int = 1,
) -> Experiment:
    """The experiment that trains these rows; `notes` stand below the budget, `order` is that of the table."""
    order = list(order) or list(rows)
    trained, usual = rows, seeds

    def plan(
        settings: AblationSettings, listen: Listener, data: Images = None, seeds: Seeds = usual, rows: Rows = None
    ) -> Iterator[Job]:
        """A job for every cell, all rows with one seed before the next."""
        folder = images_folder(data)
        source, sets = images_source(folder), cache(lambda: open_sets(_vision(settings, Row(), 0, folder), listen))
        for seed, slug in itertools.product(range(seeds), names_among(rows, trained)):
            row = trained[slug]
            trains = dataclasses.asdict(row) | ({} if settings.recipe == "short" else {"recipe": settings.recipe})
            depends = {**described(settings, "recipe", "cache", "workers"), "row": trains, "seed": seed}
            make = partial(train_row, slug, _vision(settings, row, seed, folder), sets, listen)
            yield Job({f"{slug}-seed{seed}": Origin(depends, {"images": source})}, make, seed)

    return Experiment(
        name=name,
        about=about,
        settings=AblationSettings,
        cell=Cell,
        plan=plan,
        arranged=lambda records: [record for slug in order for record in records if record.cell.row == slug],
        tables=lambda records: tables(by_row(records)),
        notes=lambda records: [*_budgets(records), *notes],
        completed=partial(_completed, paper_model),
        extras=("train",),
        processes=True,
    )


def by_row(records: Iterable[Record]) -> Found:
    return alike(records, lambda record: str(record.cell.row))


def top1(found: Sequence[Record]) -> str:
    return mean_and_deviation([record.cell.top1 for record in found], 100)


def _budgets(records: Iterable[Record]) -> list[str]:
    """Budgets, data and machines: one line per different answer."""
    told = [(record.origin.settings, record.origin.sources["images"].name, record.cell.steps) for record in records]
    budgets = [_budget(*one) for one in told]
    places = [f"{record.provenance.where()}." for record in records]
    return list(dict.fromkeys([*budgets, *places]))


def _budget(s: Mapping[str, Any], images: str, steps: int) -> str:
    paper = "recipe" in s["row"]
    augmentation = (
        "the paper's schedule, and DeiT's augmentation and regularisation: RandAugment, mixup, cutmix, erasing, every "
        "image three times in a row, label smoothing, stochastic depth and weight decay 0.05"
        if paper
        else f"cosine schedule; flips and random crops that keep at least {100 * s['crop_scale']:g} % of an image"
    )
    title = "The paper's recipe" if paper else "Short budget"
    return (
        f"{title}: {s['epochs']:g} epoch{'s' * (s['epochs'] != 1)} of {images} at {s['image_size']} px ({steps} steps "
        f"of {s['batch_size']} images); {s['model']} with {s['depth']} blocks and patches of {s['patch_size']} px; LOT "
        f"with {s['rank']} pivots unless a row says otherwise; AdamW, peak lr {s['lr']:g}, {augmentation}."
    )


def images_folder(given: Path | None, usual: str = IMAGES) -> Path:
    return given or data_folder(None, f"{usual}/train and {usual}/val") / usual


def images_source(data: Path) -> Source:
    """All files of the set, by content.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    if not data.is_dir():
        raise FileNotFoundError(f"{data} is not a folder: --data expects one that holds train/ and val/ with images.")
    return folder_source(data, (path for path in data.rglob("*") if path.is_file()))


def _completed(paper_model: str, chosen: Mapping[str, Any]) -> Mapping[str, Any]:
    """What was chosen, completed by the paper's recipe if it is that."""
    if chosen.get("recipe") != "paper":
        return chosen
    recipe = vision_settings.completed({"recipe": "paper"})
    shared = {name: recipe[name] for name in ("epochs", "batch_size", "lr")}
    size = {"model": paper_model, "depth": 12, "patch_size": 16, "image_size": 224, "rank": 32}
    return {**shared, **size, "crop_scale": VisionSettings.crop_scale[0], **chosen}


def _vision(settings: AblationSettings, row: Row, seed: int, data: Path) -> VisionSettings:
    options = {"rank": settings.rank, **row.options} if row.attention == "lot" else row.options
    model_options = {"depth": settings.depth, "patch_size": settings.patch_size, **row.model_options}
    chosen: dict[str, Any] = {
        "data": data,
        "cache": settings.cache,
        "model": settings.model,
        "attention": row.attention,
        "attention_args": tuple(f"{name}={value!r}" for name, value in options.items()),
        "model_args": tuple(f"{name}={value!r}" for name, value in model_options.items()),
        "image_size": (settings.image_size,),
        "epochs": settings.epochs,
        "batch_size": settings.batch_size,
        "lr": settings.lr,
        "crop_scale": (settings.crop_scale, 1.0),
        "seed": seed,
        "workers": settings.workers,
        "save_every": 100,
    }
    if settings.recipe == "paper":
        return VisionSettings(**vision_settings.completed({"recipe": "paper", **chosen}))
    plain: dict[str, Any] = {"crop": 1.0, "clip_norm": None, "label_smoothing": 0.1}
    return VisionSettings(recipe="none", warmup_epochs=settings.epochs / 10, **plain, **chosen)
