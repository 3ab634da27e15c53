"""`lotformer eval …`: what trained models are worth."""

from __future__ import annotations

import typer

from .vision import eval_vision

app = typer.Typer(help="Evaluate trained models.", no_args_is_help=True)


@app.callback()
def main() -> None:
    """Evaluate trained models."""


app.command("vision")(eval_vision)
