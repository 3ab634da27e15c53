"""`lotformer …`: one module per command group, joined here."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from . import evaluate, train
from .convert import convert
from .demo import demo
from .doctor import doctor
from .plugins import Extended, add_commands

app = typer.Typer(
    name="lotformer",
    cls=Extended,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lotformer {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Linear-time, doubly stochastic attention: look at it, convert with it, measure it."""


app.command()(doctor)
app.add_typer(train.app, name="train")
app.add_typer(evaluate.app, name="eval")
app.command()(convert)
app.command()(demo)
add_commands({"": app, "train": train.app, "eval": evaluate.app})
