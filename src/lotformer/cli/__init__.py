"""`lotformer …`: one module per command group, joined here."""

from __future__ import annotations

import typer

from . import bench, zoo

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


app.add_typer(bench.app, name="bench")
app.command("zoo")(zoo.zoo_command)
