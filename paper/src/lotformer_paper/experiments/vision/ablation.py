"""The base of the vision ablations: rows of one table, each a small model trained with the same budget.

A cell is one row with one seed. Every cell leaves the weights it ended with in `runs/<cell>/best.pt`, from which
figures are drawn.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import nn

from lotformer.cli.tables import Table, mean_and_deviation
from lotformer.cli.terminal import Listener
from lotformer.data.folder import VARIABLE, data_folder
from lotformer.data.vision.transforms import evaluation_transform
from lotformer.settings import Settings, setting
from lotformer.training.run import BEST, train
from lotformer.vision.build import load_trained
from lotformer.vision.evaluation import Transformed, evaluate, evaluation_loader
from lotformer.vision.settings import VisionSettings
from lotformer.vision.task import ImageSets, Vision, normalisation, open_sets

from ...results.cells import Origin, Record
from ...results.sources import Source, folder_source
from ..engine import Cells, Experiment, Job, Told, alike, described, names_among

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

    model: str = setting("lot_vit_half", "A model of lotformer.models with one size of patches.")
    depth: int = setting(4, "Blocks of the model.", at_least=1)
    patch_size: int = setting(8, "Side of a patch in pixels.", at_least=1)
    image_size: int = setting(64, "Side of the images in pixels.", at_least=1)
    rank: int = setting(16, "Pivots of LOT, where the table does not vary them.", at_least=1)
    epochs: float = setting(2.0, "Passes over the training set.", at_least=0)
    batch_size: int = setting(64, "Images per step.", at_least=1)
    lr: float = setting(1e-3, "Peak learning rate; a rise over the first tenth, then a cosine to zero.", at_least=0)
    crop_scale: float = setting(0.35, "Smallest share of the image that a random crop keeps.", at_least=0.01)


@dataclass(frozen=True)
class Row:
    """A row of a table: a mechanism with its options, and options of the model."""

    attention: str = "lot"
    options: Mapping[str, Any] = field(default_factory=dict)
    model_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """One row with one seed, evaluated after its last step.

    Attributes:
        residual: worst relative column error of its LOT layers on a batch of validation images; None without any.
        minutes: of training and its evaluation; None if the run was interrupted on the way.
        waiting, attention: shares of the last steps.
        forward_ms, backward_ms: of a training step, best of several.
    """

    row: str
    seed: int
    top1: float
    top5: float
    residual: float | None
    parameters: int
    epochs: float
    steps: int
    minutes: float | None
    images_per_second: float
    waiting: float
    attention: float | None
    forward_ms: float
    backward_ms: float


def ablation(
    name: str,
    about: str,
    rows: Mapping[str, Row],
    tables: Callable[[Found], Sequence[Table]],
    notes: Sequence[str],
    *,
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
            origin = Origin({**described(settings), "row": dataclasses.asdict(row), "seed": seed}, {"images": source})
            make = partial(_train, settings, slug, row, seed, folder, sets, listen)
            yield Job({f"{slug}-seed{seed}": origin}, make, seed)

    return Experiment(
        name=name,
        about=about,
        settings=AblationSettings,
        cell=Cell,
        plan=plan,
        arranged=lambda records: [record for slug in order for record in records if record.cell.row == slug],
        tables=lambda records: tables(by_row(records)),
        notes=lambda records: [*_budgets(records), *notes],
        extras=("train",),
    )


def by_row(records: Iterable[Record]) -> Found:
    return alike(records, lambda record: str(record.cell.row))


def top1(found: Sequence[Record]) -> str:
    return mean_and_deviation([record.cell.top1 for record in found], 100)


def _budgets(records: Iterable[Record]) -> list[str]:
    """Budgets, data and machines: one line per different answer."""
    told = [(record.origin.settings, record.origin.sources["images"].name, record.cell.steps) for record in records]
    budgets = [
        f"Short budget: {s['epochs']:g} epoch{'s' * (s['epochs'] != 1)} of {images} at {s['image_size']} px ({steps} "
        f"steps of {s['batch_size']} images); {s['model']} with {s['depth']} blocks and patches of {s['patch_size']} "
        f"px; LOT with {s['rank']} pivots unless a row says otherwise; AdamW, peak lr {s['lr']:g}, cosine schedule; "
        f"flips and random crops that keep at least {100 * s['crop_scale']:g} % of an image."
        for s, images, steps in told
    ]
    places = [f"{record.provenance.where()}." for record in records]
    return list(dict.fromkeys([*budgets, *places]))


def images_folder(given: Path | None) -> Path:
    return given or data_folder(None, f"{IMAGES}/train and {IMAGES}/val") / IMAGES


def images_source(data: Path) -> Source:
    """All files of the set, by content.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    if not data.is_dir():
        raise FileNotFoundError(f"{data} is not a folder: --data expects one that holds train/ and val/ with images.")
    return folder_source(data, (path for path in data.rglob("*") if path.is_file()))


def step_milliseconds(
    model: nn.Module, size: tuple[int, int], batch_size: int, repeats: int = 5
) -> tuple[float, float]:
    """Forward and backward of a training step on random images, each the best of several."""
    pixels, labels = torch.randn(batch_size, 3, *size), torch.zeros(batch_size, dtype=torch.long)
    model.train()
    best = [float("inf"), float("inf")]
    for _ in range(repeats):
        start = time.perf_counter()
        loss = F.cross_entropy(model(pixels), labels)
        middle = time.perf_counter()
        loss.backward()
        best = [min(best[0], middle - start), min(best[1], time.perf_counter() - middle)]
        model.zero_grad()
    return 1e3 * best[0], 1e3 * best[1]


def _vision(settings: AblationSettings, row: Row, seed: int, data: Path) -> VisionSettings:
    options = {"rank": settings.rank, **row.options} if row.attention == "lot" else row.options
    model_options = {"depth": settings.depth, "patch_size": settings.patch_size, **row.model_options}
    return VisionSettings(
        recipe="none",
        data=data,
        cache=True,
        model=settings.model,
        attention=row.attention,
        attention_args=tuple(f"{name}={value!r}" for name, value in options.items()),
        model_args=tuple(f"{name}={value!r}" for name, value in model_options.items()),
        image_size=(settings.image_size,),
        crop=1.0,
        epochs=settings.epochs,
        warmup_epochs=settings.epochs / 10,
        batch_size=settings.batch_size,
        lr=settings.lr,
        clip_norm=None,
        label_smoothing=0.1,
        crop_scale=(settings.crop_scale, 1.0),
        seed=seed,
        save_every=100,
    )


def _train(
    settings: AblationSettings,
    slug: str,
    row: Row,
    seed: int,
    data: Path,
    sets: Callable[[], ImageSets],
    listen: Listener,
    cells: Cells,
) -> None:
    name = f"{slug}-seed{seed}"
    cells.begin(name)
    folder = cells.place("runs") / name
    vision, images = _vision(settings, row, seed, data), sets()
    resumed = (folder / "last.pt").exists()
    report = train(Vision(vision, images), folder, resume=True, listeners=[Told(f"{slug}, seed {seed}", listen)])
    trained = load_trained(folder / BEST)
    assert images.val is not None
    transform = evaluation_transform(vision.size, vision.crop, **normalisation(vision))
    judged = evaluate(trained.model, evaluation_loader(Transformed(images.val, transform)))
    forward, backward = step_milliseconds(trained.model, vision.size, vision.batch_size)
    cell = Cell(
        row=slug,
        seed=seed,
        top1=judged.top1,
        top5=judged.top5,
        residual=judged.residual,
        parameters=sum(parameter.numel() for parameter in trained.model.parameters()),
        epochs=settings.epochs,
        steps=report.steps,
        minutes=None if resumed else report.seconds / 60,
        images_per_second=report.samples_per_second,
        waiting=report.waiting,
        attention=report.attention,
        forward_ms=forward,
        backward_ms=backward,
    )
    cells.finish(name, cell, {"steps": cell.steps, "epochs": cell.epochs})
