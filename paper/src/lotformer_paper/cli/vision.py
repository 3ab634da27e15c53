"""Pictures of the attention of vision models on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lotformer.cli.terminal import command_line, one_clear_error, say

from ..experiments.vision.ablation import Images, images_folder

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

        folder = images_folder(data)
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
    """The patches that each pivot gathers: soft clusters of the last block, over the image."""
    console = Console()
    with one_clear_error(console, "Cannot draw the figure", "vision", "figures"):
        from ..experiments.vision import pictures

        folder = images_folder(data)
        files = pictures.draw_clusters(checkpoint, folder, out, _indices(images, folder), command_line(), head=head)
        say(console, f"Wrote {', '.join(map(str, files))}")


def _indices(text: str | None, folder: Path) -> list[int]:
    from ..experiments.vision.pictures import spread

    try:
        return [int(part) for part in text.split(",")] if text else spread(folder, 5)
    except ValueError:
        raise ValueError(f"--images expects numbers separated by commas, got {text!r}.") from None
