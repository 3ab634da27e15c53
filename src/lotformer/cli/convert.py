"""`lotformer convert`: a checkpoint in, a converted, calibrated checkpoint out."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress


def convert(
    source: Annotated[str, typer.Argument(help="Folder of a Hugging Face checkpoint, or a package with a MODEL_DIR.")],
    out: Annotated[Path, typer.Option(help="Folder for the converted checkpoint.")],
    mechanism: Annotated[str, typer.Option(help="Name of the mechanism (lotformer.attention.names()).")] = "lot",
    rank: Annotated[int, typer.Option(help="Pivots per head.")] = 32,
    eps: Annotated[float, typer.Option(help="Entropic regularisation of LOT.")] = 0.1,
    key_masses: Annotated[
        str, typer.Option(help="uniform (doubly stochastic), linear or query-aware.")
    ] = "query-aware",
    pivots: Annotated[str, typer.Option(help="Pivots of LOT: fixed, or input-aware (slower, closer).")] = "fixed",
    texts: Annotated[
        Path | None, typer.Option(help="Texts to calibrate on, one a line; Python's reference manual if not given.")
    ] = None,
    steps: Annotated[int, typer.Option(min=0, help="Steps of calibration; 0 converts only.")] = 250,
    finetune_steps: Annotated[int, typer.Option(min=0, help="Steps of fine-tuning without labels.")] = 0,
    objective: Annotated[str, typer.Option(help="output, attention or both.")] = "output",
    seed: Annotated[int, typer.Option(help="Seed of everything.")] = 0,
) -> None:
    """Swap the attention of a trained text encoder, calibrate it, and save it as a checkpoint that loads as usual."""
    console = Console()
    try:
        options: dict[str, Any] = {"rank": rank, "eps": eps, "key_masses": key_masses}
        if pivots != "fixed":  # other mechanisms have no such option
            options["pivots"] = pivots
        _convert(console, source, out, mechanism, options, texts, steps, finetune_steps, objective, seed)
    except (ValueError, OSError, ImportError) as error:
        console.print(f"[red]Cannot convert {source}:[/] {error}", soft_wrap=True)
        raise typer.Exit(1) from error


def _convert(
    console: Console, source: str, out: Path, mechanism: str, options: dict[str, Any],
    texts: Path | None, steps: int, finetune_steps: int, objective: Any, seed: int,
) -> None:  # fmt: skip
    import torch

    from .. import conversion
    from ..data.prose import python_reference
    from ..data.text import text_batches

    torch.manual_seed(seed)
    model, tokenizer = _load(source)
    console.print(str(conversion.convert(model, mechanism, **options)))
    if steps or finetune_steps:
        lines = texts.read_text(encoding="utf-8").splitlines() if texts else python_reference().calibration
        lines = [line for line in lines if line.strip()]
        if not lines:
            raise ValueError(f"{texts} holds no text.")
        batches = text_batches(tokenizer, lines)
        if model.config.is_encoder_decoder:  # the encoder is what learns; the decoder only has to run
            batches = [{**batch, "decoder_input_ids": batch["input_ids"][:, :1]} for batch in batches]
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("calibrating")

            def show(now: int, total: int, loss: float) -> None:
                progress.update(task, completed=now, total=total, description=f"loss {loss:.3f}")

            if steps:
                report = conversion.calibrate(model, batches, objective=objective, steps=steps, seed=seed, on_step=show)
                console.print(str(report))
            if finetune_steps:
                console.print(str(conversion.finetune(model, batches, steps=finetune_steps, seed=seed, on_step=show)))
        console.print(str(conversion.coupling_quality(model, batches[:: max(1, len(batches) // 8)])))
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    console.print(
        f"Saved to [bold]{out}[/]; load it with {type(model).__name__}.from_pretrained after `import lotformer`."
    )


def _load(source: str) -> tuple[Any, Any]:
    try:
        import transformers
        from transformers import AutoConfig, AutoModel, AutoTokenizer, logging
    except ImportError as error:
        raise ImportError("converting a checkpoint needs transformers: pip install 'lotformer[text]'.") from error
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    path = Path(source)
    if not path.is_dir():
        if not source.isidentifier() or importlib.util.find_spec(source) is None:
            raise ValueError("it is neither a folder nor an installed package.")
        path = Path(getattr(importlib.import_module(source), "MODEL_DIR", ""))
    if not (path / "config.json").is_file():
        raise ValueError(f"there is no config.json in {path}: not a Hugging Face checkpoint.")
    try:
        named = AutoConfig.from_pretrained(str(path)).architectures or []
        # the class that was saved keeps its head; AutoModel would drop it
        kind = getattr(transformers, named[0], AutoModel) if named else AutoModel
        return kind.from_pretrained(str(path)), AutoTokenizer.from_pretrained(str(path))
    except Exception as error:
        raise ValueError(f"the checkpoint in {path} cannot be read: {error}") from error
