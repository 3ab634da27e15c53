"""`lotformer data …`: make the sets that training reads."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lotformer.cli.settings import with_settings
from lotformer.cli.terminal import one_clear_error, progress_bar, say
from lotformer.data.folder import VARIABLE, data_folder

from ..experiments.translation.settings import PairSettings
from .translation import prepare_pairs

app = typer.Typer(help="Prepare the sets that training reads.", no_args_is_help=True)


@app.callback()
def main() -> None:
    """Prepare the sets that training reads."""


@app.command()
@with_settings(PairSettings)
def prepare(
    settings: PairSettings,
    tasks: Annotated[
        list[str],
        typer.Argument(
            help="listops, pathfinder (generated); text, image, retrieval, film-pairs, translation (from public sets)."
        ),
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
    """Prepare Long Range Arena tasks (memory-mapped arrays) or sentence pairs, once and the same on every machine.

    Work that was interrupted is continued; a set that is already there is checked and kept. Which pairs, and how they
    are cleaned, is said by the options of translation: --corpora and those after it.
    """
    from ..data.longrange.tasks import prepared, source

    console = Console()
    for task in tasks:
        with one_clear_error(console, f"Cannot prepare {task}"):
            folder = data_folder(data_dir, "the public sets (any folder will do for generated ones)")
            if task == "translation":
                prepare_pairs(console, settings, folder)
                continue
            chosen = source(task, folder, seed=seed, brackets=brackets, released=released)
            with progress_bar(console) as listen:
                made = prepared(chosen, folder, workers=workers, listener=partial(listen, f"preparing {task}"))
        sizes = ", ".join(f"{split} {len(made[split]):,}" for split in made.splits)
        say(console, f"{task}: {sizes}; fingerprint {made.fingerprint}; {made.folder}")
