"""`lotformer data …`: make the sets that training reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..data.folder import VARIABLE, data_folder

if TYPE_CHECKING:
    from ..data.longrange.prepare import Source
    from ..data.longrange.store import PreparedSet

SETS = "longrange"
"""Folder of the prepared sets in the data folder."""

app = typer.Typer(help="Prepare the sets that training reads.", no_args_is_help=True)


@app.callback()
def main() -> None:
    """Prepare the sets that training reads."""


@app.command()
def prepare(
    tasks: Annotated[
        list[str],
        typer.Argument(help="listops, pathfinder (generated); text, image, retrieval, film-pairs (from public sets)."),
    ],
    data_dir: Annotated[
        Path | None,
        typer.Option(help=f"Folder with the public sets, in which prepared ones are kept; ${VARIABLE} by default."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of what is generated, paired or split.")] = 0,
    brackets: Annotated[
        bool, typer.Option(help="ListOps with closing brackets; published numbers are without.")
    ] = True,
    released: Annotated[bool, typer.Option(help="ListOps and Pathfinder from the arena's own files.")] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; one per core by default.")] = None,
) -> None:
    """Prepare Long Range Arena tasks: memory-mapped arrays, made once, the same on every machine.

    Work that was interrupted is continued; a set that is already there is checked and kept.
    """
    from ..data.longrange.tasks import source

    console = Console()
    for task in tasks:
        try:
            folder = data_folder(data_dir)
            chosen = source(task, folder, seed=seed, brackets=brackets, released=released)
            prepared = with_progress(console, chosen, folder / SETS, workers)
        except (ValueError, OSError, ImportError) as error:
            console.print(f"[red]Cannot prepare {escape(task)}:[/] {escape(str(error))}", soft_wrap=True)
            raise typer.Exit(1) from error
        sizes = ", ".join(f"{split} {len(prepared[split]):,}" for split in prepared.splits)
        console.print(f"{task}: {sizes}; fingerprint {prepared.fingerprint}; {prepared.folder}", soft_wrap=True)


def with_progress(console: Console, source: Source, root: Path, workers: int | None = None) -> PreparedSet:
    """The prepared set of a source, with a progress bar while it is made."""
    from ..data.longrange.prepare import prepare as make

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(f"preparing {source.task}")

        def show(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total)

        return make(source, root, workers=workers, listener=show)
