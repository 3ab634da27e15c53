"""`lotformer experiment survival-…`: what survives of real checkpoints when their attention is converted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lotformer.cli.settings import with_settings
from lotformer.cli.terminal import command_line, one_clear_error, progress_bar
from lotformer.data import glue
from lotformer.data.checkpoints import checkpoint_folder
from lotformer.data.folder import VARIABLE, data_folder

from ..data import retrieval
from ..experiments.survival import anatomy, speed, translation, vision
from ..experiments.survival import retrieval as retriever
from ..results.sources import Source, checkpoint_source, files_source, folder_source
from .reports import publish

Weights = Annotated[Path, typer.Option(help="safetensors file with the weights of the model.")]
Images = Annotated[Path, typer.Option(help="Folder with a folder of images for each class.")]
Checkpoint = Annotated[str, typer.Option(help="Folder of a Hugging Face checkpoint.")]
DataDir = Annotated[Path | None, typer.Option(help=f"Folder of unpacked data sets. [${VARIABLE}]", show_default=False)]
Out = Annotated[Path, typer.Option(help="Folder for the results; finished cells found there are not run again.")]
Variants = Annotated[str, typer.Option(help="Variants, comma-separated.")]


@with_settings(anatomy.AnatomySettings)
def conversion_anatomy(
    settings: anatomy.AnatomySettings,
    checkpoint: Weights,
    pictures: Images,
    out: Out = Path("out/conversion-anatomy"),
) -> None:
    """What the heads of a vision transformer do, and what a matrix of low rank makes of it, layer by layer."""
    console = Console()
    with one_clear_error(console, "Cannot run the experiment"):
        task = vision.VisionTask(checkpoint, pictures, settings)
        sources = _pictures(task, checkpoint, pictures)
        with progress_bar(console) as listen:
            anatomy.run(task, out, settings, sources, listen, command_line())
        publish(console, anatomy.render(out), out)


@with_settings(vision.VisionSettings)
def survival_vision(
    settings: vision.VisionSettings,
    checkpoint: Weights,
    images: Images,
    out: Out = Path("out/survival-vision"),
    variants: Variants = "lot-32, lot-64, lot-128, lot-transport-alone, lot-uniform",
) -> None:
    """A vision transformer: accuracy by prototypes before and after its attention is converted, without labels."""
    console = Console()
    with one_clear_error(console, "Cannot run the experiment"):
        task = vision.VisionTask(checkpoint, images, settings)
        sources = _pictures(task, checkpoint, images)
        with progress_bar(console) as listen:
            vision.EXPERIMENT.run(task, out, _names(variants), settings, sources, listen, command_line())
        publish(console, vision.render(out), out)


@with_settings(speed.SpeedSettings)
def survival_speed(settings: speed.SpeedSettings, out: Out = Path("out/survival-speed")) -> None:
    """A vision transformer: how much faster it is converted, whole, at several sizes of the image."""
    console = Console()
    with one_clear_error(console, "Cannot run the experiment"):
        with progress_bar(console) as listen:
            speed.run(out, settings, listen, command_line())
        publish(console, speed.render(out), out)


@with_settings(retriever.RetrievalSettings)
def survival_retrieval(
    settings: retriever.RetrievalSettings,
    checkpoint: Checkpoint,
    data_dir: DataDir = None,
    out: Out = Path("out/survival-retrieval"),
    variants: Variants = "lot-32, lot-64, lot-128, lot-transport-alone, lot-uniform",
) -> None:
    """A sentence encoder: SciFact and STS-B before and after its attention is converted, without labels."""
    console = Console()
    with one_clear_error(console, "Cannot run the experiment"):
        folder = data_folder(data_dir, f"scifact in BEIR's layout and {glue.WANTED}")
        weights = checkpoint_folder(checkpoint)
        task = retriever.RetrievalTask(weights, folder / "scifact", folder, settings)
        stsb = glue.TASKS["stsb"]
        sources = {
            "checkpoint": checkpoint_source(weights),
            "data": files_source("scifact", retrieval.files(folder / "scifact")),
            "pairs": files_source(f"glue/{stsb.folder}", glue.files(stsb, folder)),
        }
        with progress_bar(console) as listen:
            retriever.EXPERIMENT.run(task, out, _names(variants), settings, sources, listen, command_line())
        publish(console, retriever.render(out), out)


@with_settings(translation.TranslationSettings)
def survival_translation(
    settings: translation.TranslationSettings,
    checkpoint: Checkpoint,
    data_dir: DataDir = None,
    out: Out = Path("out/survival-translation"),
    variants: Variants = "lot-32, lot-64, lot-transport-alone, lot-uniform, sinkformer, espformer",
) -> None:
    """A translator: BLEU on Multi30k before and after its encoder's attention is converted, without translations."""
    console = Console()
    with one_clear_error(console, "Cannot run the experiment"):
        folder = data_folder(data_dir, "Multi30k")
        weights = checkpoint_folder(checkpoint)
        task = translation.TranslationTask(weights, folder, settings)
        sources = {"checkpoint": checkpoint_source(weights), "data": files_source("multi30k", task.files)}
        with progress_bar(console) as listen:
            translation.EXPERIMENT.run(task, out, _names(variants), settings, sources, listen, command_line())
        publish(console, translation.render(out), out)


def _pictures(task: vision.VisionTask, checkpoint: Path, folder: Path) -> dict[str, Source]:
    return {
        "checkpoint": files_source(checkpoint.name, [checkpoint]),
        "data": folder_source(folder, [file for place in task.pictures.classes for file in place]),
    }


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]
