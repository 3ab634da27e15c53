"""`lotformer convert` for timm's vision transformers: a checkpoint and unlabelled images in, a converted one out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from .. import conversion
from .._files import new_folder
from ..data.vision.checkpoints import TimmCheckpoint, open_timm
from .terminal import progress_bar, say

WEIGHTS = "lotformer.safetensors"
_BATCH, _IMAGES = 16, 256
_SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".bmp")


def convert_timm(console: Console, source: Path, out: Path, settings: Any, options: dict[str, Any]) -> None:
    """Convert, calibrate on the images in `settings.images`, and save weights, recipe and how to build the model."""
    learns = settings.steps or settings.finetune_steps
    if learns and settings.images is None:
        raise ValueError("calibration needs images: give a folder of them with --images, or convert only, --steps 0.")
    import torch

    torch.manual_seed(settings.seed)
    opened = open_timm(source, settings.timm, settings.image_size)
    say(console, str(conversion.convert(opened.model, settings.mechanism, **options)))
    if learns:
        _teach(console, opened, settings)
    with new_folder(out) as draft:
        config = {"architecture": opened.name, "model_args": opened.arguments}
        (draft / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        conversion.save(opened.model, draft / WEIGHTS)
    words = "".join(f", {name}={value!r}" for name, value in opened.arguments.items())
    say(console, f"Saved to {out}; load it with")
    say(console, f'  model = timm.create_model("{opened.name}"{words})')
    say(console, f'  lotformer.conversion.load(model, "{out / WEIGHTS}")')


def _teach(console: Console, opened: TimmCheckpoint, settings: Any) -> None:
    batches = image_batches(opened.model, settings.images)
    with progress_bar(console) as listen:

        def show(what: str) -> Callable[[int, int, float], None]:
            return lambda now, total, loss: listen(f"{what}, loss {loss:.3f}", now, total)

        if settings.steps:
            objective: Any = settings.objective  # checked by calibrate
            report = conversion.calibrate(
                opened.model, batches, objective=objective, steps=settings.steps, seed=settings.seed,
                on_step=show("calibrating"),
            )  # fmt: skip
            say(console, str(report))
        if settings.finetune_steps:
            tuned = conversion.finetune(
                opened.model, batches, steps=settings.finetune_steps, seed=settings.seed, on_step=show("fine-tuning")
            )
            say(console, str(tuned))
    say(console, str(conversion.coupling_quality(opened.model, batches[:2])))


def image_batches(model: Any, folder: Path, count: int = _IMAGES) -> list[Any]:
    """At most `count` images spread over a folder and those below it, as the model sees them; labels do not matter.

    Raises:
        FileNotFoundError: there is no image. ValueError: one cannot be decoded, by its name.
    """
    import torch
    from PIL import Image
    from timm.data import create_transform, resolve_model_data_config

    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _SUFFIXES)
    if not files:
        raise FileNotFoundError(f"no images in {folder}: expected files named {', '.join(_SUFFIXES)}.")
    config = resolve_model_data_config(model)
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if size is not None:  # what it was built for, not what its architecture was published for
        config["input_size"] = (3, *size)
    transform = create_transform(**config, is_training=False)
    chosen = [files[i * len(files) // min(count, len(files))] for i in range(min(count, len(files)))]
    made = []
    for path in chosen:
        try:
            with Image.open(path) as image:
                made.append(transform(image.convert("RGB")))
        except OSError as error:
            raise ValueError(f"{path} cannot be decoded: {error}.") from error
    return list(torch.stack(made).split(_BATCH))
