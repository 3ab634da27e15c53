"""The Long Range Arena on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lotformer.cli.settings import with_settings
from lotformer.cli.terminal import command_line, one_clear_error, progress_bar, say
from lotformer.data.folder import VARIABLE, data_folder

from ..experiments.longrange import pathfinder_check, search, table, throughput
from ..experiments.longrange.settings import LongRangeSettings, completed
from .reports import publish

WANTED = "the public sets of the tasks (aclImdb, CIFAR-10, …), or nothing for ListOps and Pathfinder"

DataDir = Annotated[
    Path | None,
    typer.Option(help=f"Folder that holds {WANTED}; prepared sets are kept in it. [${VARIABLE}]", show_default=False),
]


@with_settings(LongRangeSettings, completed)
def train_lra(
    settings: LongRangeSettings,
    data_dir: DataDir = None,
    out: Annotated[Path, typer.Option(help="Folder of the run: checkpoints, weights, logs.")] = Path("out/lra-run"),
    resume: Annotated[bool, typer.Option(help="Go on from the checkpoint in --out, if there is one.")] = False,
) -> None:
    """Train the Long Range Arena's encoder on one task with one mechanism.

    What is not given comes from the recipe for the task: the paper's learning rate, ε and mass temperature, or
    Skyformer's protocol.
    """
    console = Console()
    with one_clear_error(console, "Cannot train", "train"):
        from lotformer.cli.training import train_with_progress

        from ..experiments.longrange.task import LongRange, build_model, prepared_sets

        build_model(settings)  # what cannot be built is said before sets are prepared
        folder = data_folder(data_dir, WANTED)
        with progress_bar(console) as listen:
            sets = prepared_sets(
                settings, folder, lambda done, total: listen(f"preparing {settings.task}", done, total)
            )
        task = LongRange(settings, sets)
        train_with_progress(task, out, resume=resume)
        assert task.model is not None
        right, seen = task.count_right(task.model.eval(), "test")["accuracy"]
        residuals = task.residuals(task.model)
    told = f"; largest column residual {max(residuals):.0e}" if residuals else ""
    say(console, f"Test accuracy {right / seen:.4f} on {seen:,.0f} examples{told}")


@with_settings(table.ArenaSettings)
def experiment_lra(
    settings: table.ArenaSettings,
    data_dir: DataDir = None,
    out: Annotated[
        Path, typer.Option(help="Folder for the results; cells that are finished there are not run again.")
    ] = Path("out/lra"),
) -> None:
    """Table 2: the Long Range Arena, tasks × mechanisms × seeds, at a chosen budget."""
    console = Console()
    with one_clear_error(console, "Cannot run the experiment", "train"):
        folder = data_folder(data_dir, WANTED)
        with progress_bar(console) as listen:
            table.run(settings, folder, out, listen, command_line())
        publish(console, table.render(out), out)


@with_settings(search.SearchSettings)
def experiment_search(
    settings: search.SearchSettings,
    data_dir: DataDir = None,
    out: Annotated[
        Path, typer.Option(help="Folder for the trials; those that are finished there are not run again.")
    ] = Path("out/lra-search"),
) -> None:
    """The learning rate of every row of Table 2, found on validation data by the same trials for all."""
    console = Console()
    with one_clear_error(console, "Cannot run the search", "train"):
        folder = data_folder(data_dir, WANTED)
        with progress_bar(console) as listen:
            search.run(settings, folder, out, listen, command_line())
        publish(console, search.render(out), out)


@with_settings(throughput.ThroughputSettings)
def experiment_throughput(
    settings: throughput.ThroughputSettings,
    out: Annotated[
        Path, typer.Option(help="Folder for the results; lengths that are measured there are not run again.")
    ] = Path("out/lra-throughput"),
) -> None:
    """How fast the Long Range Arena's encoder trains as sequences grow: LOT against fused softmax."""
    console = Console()
    with one_clear_error(console, "Cannot run the experiment", "train"):
        with progress_bar(console) as listen:
            throughput.run(settings, out, listen, command_line())
        publish(console, throughput.render(out), out)


@with_settings(pathfinder_check.PathfinderSettings)
def experiment_pathfinder(
    settings: pathfinder_check.PathfinderSettings,
    out: Annotated[Path, typer.Option(help="Folder for the table and the contact sheet.")] = Path("out/pathfinder"),
) -> None:
    """Look at generated Pathfinder images, and at what their statistics tell of the label."""
    console = Console()
    with one_clear_error(console, "Cannot run the experiment", "train"):
        with progress_bar(console) as listen:
            pathfinder_check.run(settings, out, listen, command_line())
        publish(console, pathfinder_check.render(out), out)
