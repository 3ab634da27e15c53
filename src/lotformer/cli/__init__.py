"""`lotformer …`: one module per command group, joined here."""

from __future__ import annotations

import typer

from . import bench, data, experiment, figures, zoo
from .convert import convert
from .demo import demo
from .doctor import doctor

app = typer.Typer(
    name="lotformer",
    help="Linear-time, doubly stochastic attention: look at it, convert with it, measure it.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)


@app.callback()
def main() -> None:
    """Linear-time, doubly stochastic attention: look at it, convert with it, measure it."""


app.command()(doctor)
app.add_typer(data.app, name="data")
app.add_typer(experiment.app, name="experiment")
app.add_typer(figures.app, name="figures")
app.add_typer(bench.app, name="bench")
app.command("zoo")(zoo.zoo_command)
app.command()(convert)
app.command()(demo)
