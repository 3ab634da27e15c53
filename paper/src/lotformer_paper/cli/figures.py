"""`lotformer figures …`: the paper's figures, drawn from computations made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lotformer.cli.tables import Table
from lotformer.cli.terminal import one_clear_error, say, show_table
from lotformer.files import require_writable

from ..experiments import coupling_figure
from ..results import figures as results_figures
from .vision import cls_maps_figure, clusters_figure

app = typer.Typer(help="Draw the paper's figures.", no_args_is_help=True)


@app.command()
def coupling(
    out: Annotated[Path, typer.Option(help="Folder for coupling.png and coupling.svg.")] = Path("out/figures"),
    points: Annotated[int, typer.Option(min=2, help="Points in each cloud.")] = 24,
    seed: Annotated[int, typer.Option(help="Seed of the clouds and of the pivots' start.")] = 0,
) -> None:
    """Figure 1: how a pivot measure couples queries to keys.

    Draws two clouds of points, learns pivots that keep the transport between them cheap, and shows the mediated
    and the glued couplings for r = 2, 3, 4, 5, 10 pivots, sharp (ε = 0.01) and smooth (ε = 1). The table gives
    the worst relative error of the column sums: of the exact solver, and of the paper's five Sinkhorn sweeps.
    """
    console = Console()
    with one_clear_error(console, "Cannot draw the figure"):
        require_writable(out)
        if not results_figures.can_draw():
            raise ImportError(f"{results_figures.MISSING}.")
        with console.status("Learning pivots …"):
            scene = coupling_figure.make_scene(points=points, seed=seed)
        rows = tuple(
            (f"{row.eps:g}", str(row.rank), f"{row.transport_cost:.3f}", f"{row.residual:.1e}",
             f"{row.sinkhorn_residual:.1e}")
            for row in scene.rows
        )  # fmt: skip
        columns = ("ε", "r", "transport cost", "residual, newton", "residual, 5 sweeps")
        show_table(console, Table("", columns, rows, left=0))
        say(console, f"Wrote {', '.join(map(str, coupling_figure.draw(scene, out)))}")


app.command("cls-maps")(cls_maps_figure)
app.command("clusters")(clusters_figure)
