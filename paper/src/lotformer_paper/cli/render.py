"""`lotformer render`: tables and figures of stored results, without running anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lotformer.cli.terminal import one_clear_error
from lotformer.reading import read_json

from ..bench import against_sdpa, encoder, layer, loop, memory, model, roofline, runtime, solvers, vision_models, zoo
from ..experiments import balance, glue, stsb, survival
from ..experiments.longrange import pathfinder_check
from ..experiments.longrange import search as lra_search
from ..experiments.longrange import table as lra
from ..experiments.longrange import throughput as lra_throughput
from ..experiments.translation import speed as translation_speed
from ..experiments.translation import table as translation
from ..experiments.vision import ladder, rank, robustness, sinkhorn
from ..results.report import Report
from .reports import publish

_BENCHMARKS = (against_sdpa, encoder, layer, loop, memory, model, roofline, runtime, solvers, vision_models, zoo)
_EXPERIMENTS = (
    balance,
    glue,
    stsb,
    lra,
    lra_search,
    lra_throughput,
    pathfinder_check,
    ladder,
    rank,
    sinkhorn,
    robustness,
)
_TRANSLATION = (translation, translation_speed)
_SURVIVAL = (survival.anatomy, survival.speed, survival.vision, survival.retrieval, survival.translation)
RENDERERS: dict[str, Callable[[Path], Report]] = {
    module.NAME: module.render for module in (*_BENCHMARKS, *_EXPERIMENTS, *_TRANSLATION, *_SURVIVAL)
}


def render(
    folders: Annotated[list[Path], typer.Argument(help="Folders that benchmarks or experiments have written.")],
) -> None:
    """Regenerate the table and the figure of stored results without running anything."""
    console = Console()
    for folder in folders:
        with one_clear_error(console, f"Cannot render {folder}"):
            publish(console, RENDERERS[_experiment(folder)](folder), folder)


def _experiment(folder: Path) -> str:
    """The name that the JSON files in a folder carry, or that of the experiment that gathers such folders."""
    if balance.holds(folder):
        return balance.NAME
    for path in sorted(folder.rglob("*.json")):
        try:
            found = read_json(path)
        except (ValueError, OSError):
            continue  # a damaged cell is named when it is rendered
        if isinstance(found, dict) and found.get("experiment") in RENDERERS:
            return str(found["experiment"])
    raise ValueError(f"it holds no result of {', '.join(RENDERERS)}.")
