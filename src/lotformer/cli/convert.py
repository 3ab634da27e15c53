"""`lotformer convert`: a checkpoint in, a converted, calibrated checkpoint out."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from .. import conversion
from ..attention.config import OPTIONS
from ..conversion.defaults import SOUND, WINDOW_SIZES
from ..conversion.saving import is_saved
from ..data.checkpoint_files import foreign
from ..data.checkpoints import checkpoint_root, encoder_part
from ..files import new_folder, require_writable, write_text
from ..nn.key_masses import KeyMassKind
from ..nn.pivot_pooling import PivotKind
from ..ops.problem import Balance
from ..settings import Settings, setting
from .comparison import Comparison
from .settings import with_settings
from .subjects import Subject, open_subject
from .tables import Table
from .terminal import one_clear_error, progress_bar, say, show_table

_PAGE = "conversion.md"


def _default(function: Callable[..., Any], name: str) -> Any:
    return inspect.signature(function).parameters[name].default


def _meaning(option: str) -> str:
    """The explanation of an option of LOT, for a terminal."""
    text = re.sub(r" \(`\w+`\)", "", OPTIONS[option].text)
    return text[0].upper() + text[1:]


@dataclass(frozen=True)
class ConvertSettings(Settings):
    """Defaults are the library's own."""

    mechanism: str = setting("lot", "Name of the mechanism, as in `lotformer zoo`.")
    rank: int | None = setting(_default(conversion.convert, "rank"), _meaning("rank"))
    eps: float = setting(_default(conversion.convert, "eps"), _meaning("eps"))
    key_masses: KeyMassKind = setting(_default(conversion.convert, "key_masses"), _meaning("key_masses"))
    balance: Balance = setting(_default(conversion.convert, "balance"), _meaning("balance"))
    pivots: PivotKind | None = setting(_default(conversion.convert, "pivots"), _meaning("pivots"))
    window: Literal["1d", "2d", "none"] | None = setting(
        None,
        "Neighbours that tokens read by softmax: 1d along a text, 2d on the grid of patches; none is transport alone. "
        "By default what suits the tokens.",
    )
    window_size: int | None = setting(
        None,
        "Width of that window, odd; by default {text} tokens in a row or {image} patches a side; {sound} frames of "
        "sound, where pivots are found.".format(**{**WINDOW_SIZES, "sound": SOUND["window_size"]}),
        at_least=1,
    )
    content: int | None = setting(
        None,
        "With found pivots: groups whose keys a token reads by softmax, too; for more than about 1,500 tokens. By "
        "default {content} for sound, else none.".format(**SOUND),
        at_least=0,
    )
    softmax_up_to: int | None = setting(
        None,
        "Tokens up to which inputs are read by softmax, which is faster there; measured by default. 0: LOT reads all.",
        at_least=0,
    )
    max_positions: int | None = setting(
        None, "Tokens that a text encoder is to read: its learned positions are interpolated.", at_least=1
    )
    texts: Path | None = setting(None, "File of texts to calibrate on, one per line; Python's manual by default.")
    images: Path | None = setting(None, "Folder of images to calibrate a vision model on, with its sub-folders.")
    audio: Path | None = setting(
        None, "Folder of recordings to calibrate a speech model on (WAV, FLAC, Ogg), with its sub-folders."
    )
    model: str | None = setting(None, "Name of the model in timm, if the source is a file of its weights.")
    size: int | None = setting(None, "Pixels a side for a vision model; its own by default.", at_least=1)
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
            help="Folder of a Hugging Face checkpoint, a package with a MODEL_DIR, or, with --model, a file of weights."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the converted checkpoint.")],
    force: Annotated[bool, typer.Option("--force", help="Replace --out if it is an earlier conversion.")] = False,
) -> None:
    """Swap the attention of a trained model, calibrate it, and save it as a checkpoint that loads as usual.

    Text encoders, vision transformers, speech encoders and the encoders of translation models; what is left of the
    original is measured on inputs that were kept back. A sentence-transformers checkpoint stays one, with its pooling,
    normalisation and maximum length. An interrupted calibration goes on when the same command is given again.
    """
    console = Console()
    with one_clear_error(console, f"Cannot convert {source}"):
        _require_window(settings)
        out = out if out.name else out.resolve()  # "." has no name to put a draft beside
        _require_replaceable(out, _read_from(source, settings), force)
        require_writable(out.parent)
        progress = out.parent / f".{out.name}.calibration"
        subject, table = _convert(console, source, progress, settings)
        with new_folder(out) as draft:
            subject.fill(draft)
            if table is not None:
                write_text(table.markdown() + "\n", draft / _PAGE)
            _require_replaceable(out, _read_from(source, settings), force)  # calibration took its time
        progress.unlink(missing_ok=True)
    say(console, f"Saved to {out}; load it with {subject.how_to_load}.")


def _require_window(settings: ConvertSettings) -> None:
    if settings.window_size is None:
        return
    if settings.window == "none":
        raise ValueError(f"--window-size {settings.window_size} needs a window: --window 1d or --window 2d.")
    if settings.window_size % 2 == 0:
        raise ValueError(f"--window-size must be odd, so that a token is in the middle; got {settings.window_size}.")


def _read_from(source: str, settings: ConvertSettings) -> Path:
    """The file, or the folder of the encoder, that is to be converted."""
    if settings.model is not None:
        return Path(source)
    root = checkpoint_root(source)
    return root / encoder_part(root)


def _require_replaceable(out: Path, source: Path, force: bool) -> None:
    """Refuse to replace anything but an earlier conversion, and that only by force and never with the source inside.

    Nothing may be in it that no conversion writes: somebody has put it there.
    """
    if out.is_symlink():
        raise ValueError(f"{out} is a link to {out.readlink()}: give that folder itself, or another --out.")
    if not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"{out} is a file: give a folder as --out.")
    if source.exists() and any(out.samefile(place) for place in (source, *source.resolve().parents)):
        raise ValueError(f"{out} holds the checkpoint to convert, which would be deleted: give another --out.")
    if out.is_mount():
        raise ValueError(f"{out} is a mount point, which cannot be replaced as a whole: give a folder inside it.")
    if not any(out.iterdir()):
        return
    if not force:
        raise ValueError(f"{out} exists: give --force to replace it, or another --out.")
    if not is_saved(out):
        raise ValueError(f"{out} is no converted checkpoint, and --force replaces nothing else: give another --out.")
    if (stray := foreign(out)) is not None:
        raise ValueError(
            f"{out} holds {stray.relative_to(out)}, which no conversion writes and which would be deleted: move it "
            "away, or give another --out."
        )


def _convert(console: Console, source: str, progress: Path, settings: ConvertSettings) -> tuple[Subject, Table | None]:
    import torch

    torch.manual_seed(settings.seed)
    steps = max(settings.steps, settings.finetune_steps)
    subject = open_subject(
        source, model=settings.model, texts=settings.texts, images=settings.images, audio=settings.audio,
        size=settings.size, steps=steps,
    )  # fmt: skip
    options: dict[str, Any] = {"rank": settings.rank, "eps": settings.eps, "key_masses": settings.key_masses}
    if settings.softmax_up_to is not None:
        options["softmax_up_to"] = settings.softmax_up_to
    for name in ("balance", "pivots"):  # other mechanisms have no such options
        if getattr(settings, name) != _default(conversion.convert, name):
            options[name] = getattr(settings, name)
    if settings.max_positions is not None:
        options["max_positions"] = settings.max_positions
    if settings.window == "none":
        options |= {"window": None, "prefix_tokens": 0}
    elif settings.window is not None:
        options["window"] = settings.window
    for name in ("window_size", "content"):
        if getattr(settings, name) is not None:
            options[name] = getattr(settings, name)
    before = Comparison(subject) if steps else None
    say(console, str(conversion.convert(subject.model, settings.mechanism, **options)))
    if before is None:
        return subject, None
    before.add("converted", 0.0)
    with progress_bar(console) as listen:

        def show(what: str) -> Callable[[int, int, float], None]:
            return lambda now, total, loss: listen(f"{what}, loss {loss:.3f}", now, total)

        if settings.steps:
            objective: Any = settings.objective  # checked by calibrate
            report = conversion.calibrate(
                subject.body, subject.learned, objective=objective, steps=settings.steps, seed=settings.seed,
                checkpoint=progress, on_step=show("calibrating"),
                on_batch=lambda now, total: listen("running the original", now, total),
            )  # fmt: skip
            say(console, str(report.within(subject.prefix)))
            before.add("calibrated", report.seconds)
        if settings.finetune_steps:
            tuned = conversion.finetune(
                subject.body, subject.learned, steps=settings.finetune_steps, seed=settings.seed,
                on_step=show("fine-tuning"),
            )  # fmt: skip
            say(console, str(tuned))
            before.add("fine-tuned", tuned.seconds)
    table = before.table()
    show_table(console, table)
    return subject, table
