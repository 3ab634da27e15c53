"""`lotformer convert`: a checkpoint in, a converted, calibrated checkpoint out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .. import conversion
from .._files import require_writable
from .._settings import Settings, setting
from ..data.checkpoints import checkpoint_root, encoder_part, save_like
from ..data.prose import python_reference
from ..data.text import text_batches
from .settings import with_settings
from .terminal import one_clear_error, progress_bar, say


def _default(function: Callable[..., Any], name: str) -> Any:
    return inspect.signature(function).parameters[name].default


@dataclass(frozen=True)
class ConvertSettings(Settings):
    """Defaults are the library's own."""

    mechanism: str = setting("lot", "Name of the mechanism, as in `lotformer zoo`.")
    rank: int = setting(_default(conversion.convert, "rank"), "Pivots per head.")
    eps: float = setting(_default(conversion.convert, "eps"), "Entropic regularisation of LOT.")
    key_masses: str = setting(
        _default(conversion.convert, "key_masses"), "uniform (doubly stochastic), linear or query-aware."
    )
    balance: str = setting(
        _default(conversion.convert, "balance"),
        "Marginals that LOT imposes: both (as the paper), keys (half the work), or none.",
    )
    pivots: str = setting("fixed", "Pivots of LOT: fixed, or input-aware (slower, closer to the original).")
    texts: Path | None = setting(None, "File of texts to calibrate on, one per line; Python's manual by default.")
    images: Path | None = setting(None, "Folder of images to calibrate a vision model on; labels are not needed.")
    timm: str | None = setting(None, "Name of the model in timm, where the source is a file of its weights.")
    image_size: int | None = setting(None, "Pixels a side of a vision model's images, if not its own.", at_least=1)
    steps: int = setting(_default(conversion.calibrate, "steps"), "Steps of calibration; 0 converts only.", at_least=0)
    finetune_steps: int = setting(0, "Steps of fine-tuning without labels.", at_least=0)
    objective: str = setting(_default(conversion.calibrate, "objective"), "output, attention or both.")
    seed: int = setting(0, "Random seed.")


@with_settings(ConvertSettings)
def convert(
    settings: ConvertSettings,
    source: Annotated[
        str,
        typer.Argument(
            help="Folder of a Hugging Face or timm checkpoint, a package with a MODEL_DIR, or a file of timm's weights."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the converted checkpoint.")],
    force: Annotated[bool, typer.Option("--force", help="Replace --out if it exists.")] = False,
) -> None:
    """Swap the attention of a trained text encoder, calibrate it, and save it as a checkpoint that loads as usual.

    A sentence-transformers checkpoint stays one, with its pooling, normalisation and maximum length. A timm checkpoint
    becomes a folder with its weights and recipe, for `lotformer.conversion.load`.
    """
    console = Console()
    with one_clear_error(console, f"Cannot convert {source}"):
        if settings.timm is not None or Path(source).is_file() or _is_timms(Path(source)):
            from .convert_vision import convert_timm

            _require_replaceable(out, Path(source), force)
            require_writable(out.parent)
            convert_timm(console, Path(source), out, settings, _options(settings))
            return
        root = checkpoint_root(source)
        _require_replaceable(out, root, force)
        require_writable(out.parent)
        model = _convert(console, root, settings)
        save_like(root, model, out)
    say(console, f"Saved to {out}; load it with {type(model).__name__}.from_pretrained after `import lotformer`.")


def _require_replaceable(out: Path, root: Path, force: bool) -> None:
    """What is replaced is gone: only a checkpoint may be, only by force, and never a folder that holds the source."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not force:
        raise ValueError(f"{out} exists: give --force to replace it, or another --out.")
    if not any((out / name).is_file() for name in ("config.json", "modules.json")):
        raise ValueError(f"{out} is not a checkpoint, and --force replaces nothing else: give another --out.")
    if out.resolve() in root.resolve().parents:
        raise ValueError(f"{out} holds the checkpoint to convert, which would be deleted: give another --out.")


def _is_timms(folder: Path) -> bool:
    from ..data.vision.checkpoints import is_timm_folder

    return is_timm_folder(folder)


def _options(settings: ConvertSettings) -> dict[str, Any]:
    named = ("rank", "eps", "key_masses", "balance")
    options: dict[str, Any] = {name: getattr(settings, name) for name in named}
    if settings.pivots != "fixed":  # other mechanisms have no such option
        options["pivots"] = settings.pivots
    return options


def _convert(console: Console, root: Path, settings: ConvertSettings) -> Any:
    import torch

    torch.manual_seed(settings.seed)
    model, tokenizer = _load(root / encoder_part(root))
    say(console, str(conversion.convert(model, settings.mechanism, **_options(settings))))
    if not settings.steps and not settings.finetune_steps:
        return model
    texts = settings.texts
    lines = texts.read_text(encoding="utf-8").splitlines() if texts else python_reference().calibration
    lines = [line for line in lines if line.strip()]
    if not lines:
        raise ValueError(f"{texts} holds no text.")
    batches = text_batches(tokenizer, lines)
    if model.config.is_encoder_decoder:  # the encoder is what learns; the decoder only has to run
        batches = [{**batch, "decoder_input_ids": batch["input_ids"][:, :1]} for batch in batches]
    with progress_bar(console) as listen:

        def show(what: str) -> Callable[[int, int, float], None]:
            return lambda now, total, loss: listen(f"{what}, loss {loss:.3f}", now, total)

        if settings.steps:
            objective: Any = settings.objective  # checked by calibrate
            report = conversion.calibrate(
                model, batches, objective=objective, steps=settings.steps, seed=settings.seed,
                on_step=show("calibrating"),
            )  # fmt: skip
            say(console, str(report))
        if settings.finetune_steps:
            tuned = conversion.finetune(
                model, batches, steps=settings.finetune_steps, seed=settings.seed, on_step=show("fine-tuning")
            )
            say(console, str(tuned))
    say(console, str(conversion.coupling_quality(model, batches[:: max(1, len(batches) // 8)])))
    return model


def _load(folder: Path) -> tuple[Any, Any]:
    try:
        import transformers
        from transformers import AutoConfig, AutoModel, AutoTokenizer, logging
    except ImportError as error:
        raise ImportError("converting a checkpoint needs transformers: pip install 'lotformer[text]'.") from error
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        named = AutoConfig.from_pretrained(str(folder)).architectures or []
        # the class that was saved keeps its head; AutoModel would drop it
        kind = getattr(transformers, named[0], AutoModel) if named else AutoModel
        return kind.from_pretrained(str(folder)), AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:
        raise ValueError(f"the checkpoint in {folder} cannot be read: {error}") from error
