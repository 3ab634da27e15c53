"""Train a vision model on the shared loop: what a step computes, when it is evaluated, what is kept."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...data.vision.cache import decoded
from ...data.vision.sources import Images, open_images
from ...data.vision.transforms import Augmentation, evaluation_transform, training_transform
from ...training.checkpoints import Checkpoint
from ...training.fingerprints import shapes
from ...training.loop import Loop, LoopSettings, OnStep
from ...training.random_state import isolated
from ...training.updates import LocalUpdates
from .build import Architecture, architecture, build, save_model
from .evaluation import Evaluation, evaluate, evaluation_loader
from .settings import DataSettings, VisionSettings
from .stream import Batch, ImageStream, Order


@dataclass(frozen=True)
class VisionReport:
    """What a run gave. `seconds` counts training alone, `images_per_second` its steps.

    Attributes:
        best, last: evaluations, the best by top-1 accuracy. broken: files that could not be decoded.
    """

    best: Evaluation
    last: Evaluation
    epochs: float
    steps: int
    seconds: float
    images_per_second: float
    parameters: int
    broken: list[str]


@dataclass(frozen=True)
class ImageSets:
    """What a run trains and is evaluated on."""

    train: Images
    val: Images

    @property
    def classes(self) -> list[str]:
        return self.train.classes


def open_sets(settings: VisionSettings, progress: Callable[[str, int, int], None] | None = None) -> ImageSets:
    """Both splits, decoded into memory if the settings say so.

    Raises:
        ValueError: the splits do not have the same classes.
    """
    train = open_images(settings.source, settings.data, settings.train_split)
    val = open_validation(settings, train.classes)
    if settings.cache:
        tell = progress or (lambda *_: None)
        train = decoded(train, partial(tell, "decoding training images"))
        val = decoded(val, partial(tell, "decoding validation images"))
    return ImageSets(train, val)


def open_validation(settings: DataSettings, classes: list[str]) -> Images:
    """The evaluated split, whose classes must be those that the model tells apart.

    Raises:
        ValueError: they are not, with how many there are or which differ.
    """
    images = open_images(settings.source, settings.data, settings.val_split)
    if len(images.classes) != len(classes):
        raise ValueError(
            f"the split {settings.val_split!r} has {len(images.classes)} classes, the model tells {len(classes)} "
            "apart: labels would not fit."
        )
    different = [
        f"{ours!r} and {theirs!r}" for ours, theirs in zip(classes, images.classes, strict=True) if ours != theirs
    ]
    if different:
        raise ValueError(f"the split {settings.val_split!r} has other classes than the model: {different[0]}.")
    return images


def train(
    settings: VisionSettings,
    sets: ImageSets,
    out: Path,
    *,
    on_step: OnStep | None = None,
    on_evaluation: Callable[[float, Evaluation], None] | None = None,
) -> VisionReport:
    """Train from scratch, or go on where `out/last.checkpoint` is; leaves `best.pt`, `last.pt` and `log.jsonl` there."""
    out.mkdir(parents=True, exist_ok=True)
    described = architecture(settings, sets.classes)
    with isolated(settings.seed):
        model = build(described)
    transforms = _model_transforms(model)
    order = Order(len(sets.train), settings.batch_size, settings.seed, repeats=settings.repeats)
    augmentation = Augmentation(
        scale=(settings.crop_scale[0], settings.crop_scale[-1]),
        color_jitter=settings.color_jitter,
        randaugment=settings.randaugment,
        erasing=settings.erasing,
    )
    stream = ImageStream(
        sets.train,
        training_transform(settings.size, augmentation, **transforms),
        order,
        _mixer(settings, len(sets.classes)),
        settings.workers,
    )
    per_epoch = order.batches_per_epoch
    peak = settings.lr * settings.batch_size / settings.lr_batch
    loop_settings = LoopSettings(
        steps=max(1, round(settings.epochs * per_epoch)),
        warmup=round(settings.warmup_epochs * per_epoch),
        final=min(1.0, settings.min_lr / peak) if peak else 1.0,
        save_every=max(1, round(settings.eval_every * per_epoch)),
        seed=settings.seed,
    )
    transform = evaluation_transform(settings.size, settings.crop, **transforms)
    batches = evaluation_loader(sets.val, transform, workers=settings.workers)
    work = _Classification(model, settings, described, loop_settings, per_epoch, batches, out, on_evaluation)
    checkpoint = Checkpoint(
        out / "last.checkpoint",
        {
            "settings": _plain(settings),
            "images": {"train": len(sets.train), "val": len(sets.val), "classes": len(sets.classes)},
            "model": shapes(model.state_dict()),
        },
    )
    updates = LocalUpdates(
        dict(model.state_dict(keep_vars=True)),
        _groups(model, settings.weight_decay, peak),
        partial(torch.optim.AdamW, betas=(0.9, 0.999), eps=1e-8),
        settings.clip,
    )
    loop = Loop(loop_settings, work, stream, updates, checkpoint, on_step)
    loop.run()
    save_model(out / "last.pt", work.evaluated, described, work.note(loop.step))
    return work.report(loop.step, sum(p.numel() for p in model.parameters()), _names(sets, stream.broken))


class _Classification:
    """The work of the loop: cross-entropy on mixed labels, a running mean of the weights, evaluation."""

    def __init__(
        self,
        model: nn.Module,
        settings: VisionSettings,
        described: Architecture,
        loop: LoopSettings,
        per_epoch: int,
        batches: Any,
        out: Path,
        on_evaluation: Callable[[float, Evaluation], None] | None,
    ) -> None:
        from timm.utils import ModelEmaV3

        self.model, self.settings, self.described, self.loop = model, settings, described, loop
        self.per_epoch, self.batches, self.out, self.on_evaluation = per_epoch, batches, out, on_evaluation
        self.every = max(1, round(settings.eval_every * per_epoch))
        self.ema = ModelEmaV3(model, decay=settings.ema) if settings.ema else None
        self.best: Evaluation | None = None
        self.last: Evaluation | None = None
        self.seconds = 0.0
        self._since = time.perf_counter()

    @property
    def evaluated(self) -> nn.Module:
        """The running mean where there is one, else the model."""
        return self.model if self.ema is None else self.ema.module

    def begin(self) -> None:
        (self.out / "log.jsonl").unlink(missing_ok=True)
        self._since = time.perf_counter()

    def losses(self, batch: Batch, step: int) -> Iterable[Tensor]:
        self.model.train()
        pixels, targets = batch
        bfloat16 = self.settings.precision == "bfloat16"
        with torch.autocast(pixels.device.type, torch.bfloat16, enabled=bfloat16):
            logits = self.model(pixels)
        smoothing = self.settings.smoothing if targets.dim() == 1 else 0.0  # mixed targets are smoothed already
        yield F.cross_entropy(logits.float(), targets, label_smoothing=smoothing)

    def after(self, step: int) -> bool:
        if self.ema is not None:
            self.ema.update(self.model, step=step)
        if step % self.every == 0 or step == self.loop.steps:
            self._evaluate(step)
        return False

    def _evaluate(self, step: int) -> None:
        self.seconds += time.perf_counter() - self._since
        self.last = evaluate(self.evaluated, self.batches)
        epoch = step / self.per_epoch
        line = {"step": step, "epoch": epoch, "seconds": self.seconds, **dataclasses.asdict(self.last)}
        with open(self.out / "log.jsonl", "a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")
        if self.best is None or self.last.top1 > self.best.top1:
            self.best = self.last
            save_model(self.out / "best.pt", self.evaluated, self.described, self.note(step))
        if self.on_evaluation is not None:
            self.on_evaluation(epoch, self.last)
        self._since = time.perf_counter()

    def note(self, step: int) -> dict[str, Any]:
        return {
            "settings": _plain(self.settings),
            "step": step,
            "evaluation": None if self.last is None else dataclasses.asdict(self.last),
        }

    def report(self, steps: int, parameters: int, broken: list[str]) -> VisionReport:
        if self.best is None or self.last is None:
            raise RuntimeError("the run has not been evaluated.")
        rate = steps * self.settings.batch_size / self.seconds if self.seconds else math.nan
        epochs = steps / self.per_epoch
        return VisionReport(self.best, self.last, epochs, steps, self.seconds, rate, parameters, broken)

    def state_dict(self) -> dict[str, Any]:
        now = time.perf_counter()
        return {
            "seconds": self.seconds + now - self._since,
            "best": None if self.best is None else dataclasses.asdict(self.best),
            "last": None if self.last is None else dataclasses.asdict(self.last),
            "ema": None if self.ema is None else self.ema.module.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seconds, self._since = state["seconds"], time.perf_counter()
        self.best = None if state["best"] is None else Evaluation(**state["best"])
        self.last = None if state["last"] is None else Evaluation(**state["last"])
        if self.ema is not None:
            self.ema.module.load_state_dict(state["ema"])


def _model_transforms(model: nn.Module) -> dict[str, Any]:
    from timm.data import resolve_data_config

    config = resolve_data_config({}, model=model)
    return {name: config[name] for name in ("interpolation", "mean", "std")}


def _mixer(settings: VisionSettings, classes: int) -> Callable[[Tensor, Tensor], Batch] | None:
    if not settings.mixup and not settings.cutmix:
        return None
    from timm.data import Mixup

    return Mixup(settings.mixup, settings.cutmix, label_smoothing=settings.smoothing, num_classes=classes)


def _groups(model: nn.Module, weight_decay: float, lr: float) -> list[dict[str, Any]]:
    """timm's parameter groups: no decay for vectors and for what the model's parts keep from it."""
    from timm.optim import param_groups_weight_decay

    spared = model.no_weight_decay() if hasattr(model, "no_weight_decay") else set()
    groups = param_groups_weight_decay(model, weight_decay, no_weight_decay_list=spared)
    return [{**group, "lr": lr} for group in groups]


def _plain(settings: VisionSettings) -> dict[str, Any]:
    """Settings as plain values, without what may change between two halves of a run: where the data are, workers."""
    left_out = ("data", "workers", "cache")
    return {name: value for name, value in dataclasses.asdict(settings).items() if name not in left_out}


def _names(sets: ImageSets, broken: set[int]) -> list[str]:
    return sorted([sets.train.name(i) for i in broken] + [sets.val.name(i) for i in sets.val.broken])
