"""`lotformer experiment …`: the paper's tables, each resumable; a command for each declaration."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lotformer.cli.settings import with_settings
from lotformer.cli.terminal import command_line, one_clear_error, progress_bar
from lotformer.settings import Settings

from ..experiments import engine
from ..experiments.registry import EXPERIMENTS
from .reports import publish

app = typer.Typer(help="Reproduce the paper's tables.", no_args_is_help=True)

_OUT = typer.Option(help="Folder for the results; finished cells found there are not run again.")


def command(experiment: engine.Experiment) -> Callable[..., None]:
    """A command with an option for every setting and every input of an experiment."""

    def run(settings: Settings, out: Path, **inputs: Any) -> None:
        console = Console()
        with one_clear_error(console, "Cannot run the experiment", *experiment.extras):
            first = engine.team_of(experiment).process.index == 0
            with progress_bar(console if first else Console(quiet=True)) as listen:
                engine.run(experiment, settings, out, listen, command_line(), **inputs)
            if first:
                publish(console, engine.report(experiment, out), out)

    out = inspect.Parameter(
        "out",
        inspect.Parameter.KEYWORD_ONLY,
        default=Path("out") / experiment.name,
        annotation=Annotated[Path, _OUT],
    )
    run.__signature__ = inspect.Signature([*experiment.inputs, out])  # type: ignore[attr-defined]  # where typer looks
    run.__doc__ = experiment.about
    return with_settings(experiment.settings, experiment.completed)(run)


for _experiment in EXPERIMENTS.values():
    app.command(_experiment.name)(command(_experiment))
