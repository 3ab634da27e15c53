"""The Long Range Arena on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lotformer.cli.settings import with_settings
from lotformer.cli.terminal import one_clear_error, progress_bar, say
from lotformer.data.folder import data_folder

from ..experiments.inputs import ARENA, ArenaData
from ..experiments.longrange.settings import LongRangeSettings, completed


@with_settings(LongRangeSettings, completed)
def train_lra(
    settings: LongRangeSettings,
    data_dir: ArenaData = None,
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
        folder = data_folder(data_dir, ARENA)
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
