"""`lotformer render`: tables and figures of stored results, without running anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lotformer.cli.terminal import one_clear_error

from ..bench import against_sdpa, encoder, layer, loop, memory, model, roofline, runtime, solvers, vision_models, zoo
from ..experiments import engine
from ..results.report import Report
from .reports import publish

_BENCHMARKS = {
    module.NAME: module.render
    for module in (against_sdpa, encoder, layer, loop, memory, model, roofline, runtime, solvers, vision_models, zoo)
}


def render(
    folders: Annotated[list[Path], typer.Argument(help="Folders that benchmarks or experiments have written.")],
) -> None:
    """Regenerate the table and the figure of stored results without running anything."""
    console = Console()
    for folder in folders:
        with one_clear_error(console, f"Cannot render {folder}"):
            publish(console, report_of(folder), folder)


def report_of(folder: Path) -> Report:
    """The report of the benchmark or the experiment that the results in a folder name."""
    return _BENCHMARKS.get(engine.name_of(folder), engine.render)(folder)
