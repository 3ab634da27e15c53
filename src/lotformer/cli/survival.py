"""`lotformer experiment survival-…`: what survives of real checkpoints when their attention is converted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..experiments.survival import vision
from ..results.sources import files_source
from .settings import with_settings
from .terminal import command_line, one_clear_error, progress_bar, publish

Out = Annotated[Path, typer.Option(help="Folder for the results; finished cells found there are not run again.")]
Variants = Annotated[str, typer.Option(help="Variants, comma-separated.")]


@with_settings(vision.VisionSettings)
def survival_vision(
    settings: vision.VisionSettings,
    checkpoint: Annotated[Path, typer.Option(help="safetensors file with the weights of the model.")],
    images: Annotated[Path, typer.Option(help="Folder with a folder of images for each class.")],
    out: Out = Path("out/survival-vision"),
    variants: Variants = "lot-32, lot-64, lot-128, lot-transport-alone, lot-uniform",
) -> None:
    """A vision transformer: accuracy by prototypes before and after its attention is converted, without labels."""
    console = Console()
    with one_clear_error(console, "Cannot run the experiment"):
        task = vision.VisionTask(checkpoint, images, settings)
        sources = {
            "checkpoint": files_source(checkpoint.name, [checkpoint]),
            "data": files_source(images.name, [file for place in task.pictures.classes for file in place]),
        }
        with progress_bar(console) as listen:
            vision.EXPERIMENT.run(task, out, _names(variants), settings, sources, listen, command_line())
        publish(console, vision.render(out), out)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]
