"""`lotformer train …`: from fresh weights, on the one training loop."""

from __future__ import annotations

import typer

from .plugins import Extended
from .vision import train_vision

app = typer.Typer(help="Train models from scratch.", no_args_is_help=True, cls=Extended)


@app.callback()
def main() -> None:
    """Train models from scratch."""


app.command("vision")(train_vision)
