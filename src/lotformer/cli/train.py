"""`lotformer train …`: from fresh weights, on the one training loop."""

from __future__ import annotations

import typer

from lotformer_paper.cli.longrange import train_lra
from lotformer_paper.cli.translation import train_translation

from .vision import train_vision

app = typer.Typer(help="Train models from scratch.", no_args_is_help=True)


@app.callback()
def main() -> None:
    """Train models from scratch."""


app.command("vision")(train_vision)
app.command("lra")(train_lra)
app.command("translation")(train_translation)
