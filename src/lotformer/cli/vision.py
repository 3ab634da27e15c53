"""Image classification on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..vision.settings import ImageSettings, VisionSettings, completed
from .settings import with_settings
from .tables import Table
from .terminal import one_clear_error, progress_bar, say, show_table


@with_settings(VisionSettings, completed)
def train_vision(
    settings: VisionSettings,
    out: Annotated[Path, typer.Option(help="Folder of the run: checkpoints, weights, logs.")] = Path("out/vision-run"),
    resume: Annotated[bool, typer.Option(help="Go on from the checkpoint in --out, if there is one.")] = False,
) -> None:
    """Train a vision model on images: lotformer train vision --data imagenet --recipe paper."""
    console = Console()
    with one_clear_error(console, "Cannot train", "train"):
        from ..vision.task import Vision, open_sets
        from .training import train_with_progress

        with progress_bar(console) as listen:
            task = Vision(settings, open_sets(settings, listen))
        train_with_progress(task, out, resume=resume)
        broken = task.broken_files()
        if broken:
            say(console, f"{len(broken)} images could not be decoded and were skipped: {', '.join(broken)}")


@with_settings(ImageSettings)
def eval_vision(
    settings: ImageSettings,
    checkpoint: Annotated[Path, typer.Option(help="The best.pt of a run of `lotformer train vision`.")],
    drop: Annotated[str, typer.Option(help="Shares of patches to blank, separated by commas.")] = "0.25,0.5,0.75",
    patch_size: Annotated[int, typer.Option(min=1, help="Side of such a patch in pixels.")] = 16,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 128,
    workers: Annotated[int, typer.Option(min=0, help="Processes that load images.")] = 0,
) -> None:
    """Accuracy, throughput, accuracy with blank patches, and the column residual of every LOT layer.

    The images are resized to the size that the model was trained with.
    """
    console = Console()
    with one_clear_error(console, "Cannot evaluate", "vision"):
        from ..vision.build import load_trained
        from ..vision.task import evaluate_trained

        trained = load_trained(checkpoint)
        with progress_bar(console) as listen:
            judged, broken = evaluate_trained(
                trained,
                settings,
                drop=_shares(drop),
                patch_size=patch_size,
                batch_size=batch_size,
                workers=workers,
                progress=lambda now, total: listen("evaluating", now, total),
            )
    rows = [
        ("top-1", _percent(judged.top1)),
        ("top-5", _percent(judged.top5)),
        *((f"top-1, {float(share):.0%} of patches blank", _percent(kept)) for share, kept in judged.dropped.items()),
        ("images", f"{judged.images:,}"),
        ("images per second", f"{judged.images_per_second:.0f}"),
    ]
    title = f"{trained.settings.model} after {trained.step} steps"
    show_table(console, Table(title, ("", ""), tuple(rows)))
    if judged.residuals:
        residuals = tuple((name, f"{value:.1e}") for name, value in judged.residuals.items())
        show_table(console, Table("Worst relative column error", ("layer", "residual"), residuals))
    if broken:
        say(console, f"{len(broken)} images could not be decoded and were skipped: {', '.join(broken)}")


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _shares(text: str) -> tuple[float, ...]:
    try:
        shares = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        shares = (-1.0,)
    if not all(0 <= share <= 1 for share in shares):
        raise ValueError(f"--drop expects shares between 0 and 1, separated by commas, got {text!r}.")
    return shares
