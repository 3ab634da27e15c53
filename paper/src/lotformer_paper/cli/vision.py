"""The ablations of vision models, and their pictures, on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lotformer.cli.settings import with_settings
from lotformer.cli.terminal import command_line, one_clear_error, progress_bar, say
from lotformer.data.folder import VARIABLE, data_folder
from lotformer.files import require_writable

from ..experiments.vision import ablation, ladder, rank, robustness, sinkhorn
from ..results import plain
from .reports import publish

IMAGES = "imagenette2-128"
Images = Annotated[
    Path | None,
    typer.Option(
        help=f"Folder that holds train/ and val/ with one folder per class; by default {IMAGES} in ${VARIABLE}.",
        show_default=False,
    ),
]
Out = Annotated[Path, typer.Option(help="Folder for the results; cells that are finished there are not run again.")]
Seeds = Annotated[int, typer.Option(min=1, help="Times to train each row, each with another seed.")]
Rows = Annotated[str | None, typer.Option(help="Rows to run, comma-separated; by default all.")]


@with_settings(ablation.AblationSettings)
def vision_ladder(
    settings: ablation.AblationSettings,
    data: Images = None,
    out: Out = Path("out/vision-ladder"),
    seeds: Seeds = 2,
    rows: Rows = None,
) -> None:
    """Table 3: what each part of LOT adds in a small ViT, beside PolaFormer, FLatten and softmax."""
    _ablation(ladder, settings, data, out, seeds, rows)


@with_settings(ablation.AblationSettings)
def sinkhorn_ablation(
    settings: ablation.AblationSettings,
    data: Images = None,
    out: Out = Path("out/sinkhorn-ablation"),
    seeds: Seeds = 1,
    rows: Rows = None,
) -> None:
    """Table 6: accuracy by Sinkhorn sweeps, ε and masses, and with the exact solver."""
    _ablation(sinkhorn, settings, data, out, seeds, rows)


@with_settings(ablation.AblationSettings)
def rank_ablation(
    settings: ablation.AblationSettings,
    data: Images = None,
    out: Out = Path("out/rank-ablation"),
    seeds: Seeds = 1,
    rows: Rows = None,
) -> None:
    """Table 7: accuracy, and time of a step, by the number of pivots."""
    _ablation(rank, settings, data, out, seeds, rows)


@with_settings(robustness.RobustnessSettings)
def vision_robustness(
    settings: robustness.RobustnessSettings,
    ladder_folder: Annotated[
        Path, typer.Option("--ladder", help="Folder of `lotformer experiment vision-ladder`.")
    ] = Path("out/vision-ladder"),
    data: Images = None,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("out/robustness"),
) -> None:
    """Accuracy when patches are missing, and how evenly each mechanism reads them, of the ladder's models."""
    console = Console()
    with one_clear_error(console, "Cannot run the experiment", "train"):
        folder = _images_folder(data)
        require_writable(out)
        with progress_bar(console) as listen:
            result = robustness.run(ladder_folder, folder, settings, listen, command_line())
        plain.write(result, out / "result.json")
        publish(console, robustness.render(out), out)


def _ablation(
    experiment: Any,
    settings: ablation.AblationSettings,
    data: Path | None,
    out: Path,
    seeds: int,
    rows: str | None,
) -> None:
    console = Console()
    with one_clear_error(console, "Cannot run the experiment", "train"):
        folder = _images_folder(data)
        chosen = [name.strip() for name in rows.split(",")] if rows else list(experiment.ROWS)
        for name in chosen:
            if name not in experiment.ROWS:
                raise ValueError(f"{name!r} is not one of the rows {', '.join(experiment.ROWS)}.")
        picked = {name: experiment.ROWS[name] for name in chosen}
        with progress_bar(console) as listen:
            ablation.run(experiment.NAME, picked, folder, out, settings, seeds, listen, command_line())
        publish(console, experiment.render(out), out)


Indices = Annotated[
    str | None, typer.Option(help="Numbers of the validation images to show; five spread over the set if not given.")
]
Pictures = Annotated[Path, typer.Option(help="Folder for the pictures.")]


def cls_maps_figure(
    ladder_folder: Annotated[
        Path, typer.Option("--ladder", help="Folder of `lotformer experiment vision-ladder`.")
    ] = Path("out/vision-ladder"),
    ranks_folder: Annotated[
        Path, typer.Option("--ranks", help="Folder of `lotformer experiment rank-ablation`.")
    ] = Path("out/rank-ablation"),
    data: Images = None,
    images: Indices = None,
    out: Pictures = Path("out/cls-maps"),
) -> None:
    """Figure 2: what the class token reads, by number of pivots and by how it is treated.

    Drawn from the weights that both experiments leave behind.
    """
    console = Console()
    with one_clear_error(console, "Cannot draw the figure", "vision", "figures"):
        from ..experiments.vision import pictures

        folder = _images_folder(data)
        chosen = _indices(images, folder)
        for name, checkpoints in pictures.panels(ladder_folder, ranks_folder).items():
            files = pictures.draw_cls_maps(name, checkpoints, folder, out, chosen, command_line())
            say(console, f"Wrote {', '.join(map(str, files))}")


def clusters_figure(
    checkpoint: Annotated[Path, typer.Option(help="The best.pt of a ViT with LOT attention.")],
    data: Images = None,
    images: Indices = None,
    head: Annotated[int, typer.Option(min=0, help="Head of the last block to look at.")] = 0,
    out: Pictures = Path("out/clusters"),
) -> None:
    """Which patches each pivot gathers: the soft clusters of the last block, over the image."""
    console = Console()
    with one_clear_error(console, "Cannot draw the figure", "vision", "figures"):
        from ..experiments.vision import pictures

        folder = _images_folder(data)
        files = pictures.draw_clusters(checkpoint, folder, out, _indices(images, folder), command_line(), head=head)
        say(console, f"Wrote {', '.join(map(str, files))}")


def _images_folder(given: Path | None) -> Path:
    return given or data_folder(None, f"{IMAGES}/train and {IMAGES}/val") / IMAGES


def _indices(text: str | None, folder: Path) -> list[int]:
    from ..experiments.vision.pictures import spread

    try:
        return [int(part) for part in text.split(",")] if text else spread(folder, 5)
    except ValueError:
        raise ValueError(f"--images expects numbers separated by commas, got {text!r}.") from None
