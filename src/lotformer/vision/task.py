"""Image classification as a task of the training loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from ..data.vision.cache import decoded
from ..data.vision.sources import STREAMED, Images, open_images, open_stream, stream_fingerprint
from ..data.vision.transforms import Augmentation, evaluation_transform, training_transform
from ..training.loader import LoaderStream
from ..training.stream import TrainingStream
from ..training.task import Sums
from ..training.teams import Process
from .batches import Augmented, ImageBatch, Mix, Mixed, StreamedImages, repeated
from .build import Trained, build
from .evaluation import Evaluation, Progress, Transformed, count_right, evaluate, evaluation_loader
from .settings import ImageSettings, VisionSettings

Listen = Callable[[str, int, int], None]
"""Called with what is being done, how far it is, and how far it will go."""


@dataclass(frozen=True)
class ImageSets:
    """The training and evaluation sets; both None for a source that can only be streamed."""

    train: Images | None
    val: Images | None

    def described(self) -> str:
        """Sizes and contents, by which a checkpoint knows its data again."""
        assert self.train is not None
        assert self.val is not None
        learned = f"{len(self.train)} images of {len(self.train.classes)} classes, {self.train.fingerprint()}"
        return f"{learned}; judged by {len(self.val)}, {self.val.fingerprint()}"


def open_sets(settings: VisionSettings, listen: Listen = lambda what, now, total: None) -> ImageSets:
    """Both splits, decoded into memory if the settings say so.

    Raises:
        ValueError: the splits have different classes, or a streamed source was given without their number.
    """
    if settings.source.startswith(STREAMED):
        if settings.num_classes is None:
            raise ValueError(f"{settings.source} does not tell how many classes it has: give --num-classes.")
        return ImageSets(None, None)
    if not settings.source and settings.data is not None and settings.data.is_file():
        raise ValueError(
            f"{settings.data} is one file without splits: it would be validated on its own training images. "
            "Unpack it into a folder that holds train/ and val/."
        )
    train = open_images(settings.source, settings.data, settings.train_split)
    val = open_validation(settings, len(train.classes), train.classes)
    if settings.cache:
        train = decoded(train, partial(listen, "decoding training images"))
        val = decoded(val, partial(listen, "decoding validation images"))
    else:  # all files are read once, to tell them from others
        train.fingerprint(partial(listen, "reading training images"))
        val.fingerprint(partial(listen, "reading validation images"))
    return ImageSets(train, val)


def open_validation(settings: ImageSettings, count: int, names: list[str] | None = None) -> Images:
    """The evaluated split, whose classes must be those that the model tells apart.

    Raises:
        ValueError: their number or their names differ.
    """
    images = open_images(settings.source, settings.data, settings.val_split)
    if len(images.classes) != count:
        raise ValueError(
            f"the split {settings.val_split!r} has {len(images.classes)} classes and the model {count}: "
            "its answers would mean something else."
        )
    for ours, theirs in zip(names or images.classes, images.classes, strict=True):
        if ours != theirs:
            raise ValueError(f"the split {settings.val_split!r} has a class {theirs!r} where training has {ours!r}.")
    return images


class Vision:
    """Cross-entropy on augmented, mixed images; judged by top-1 accuracy.

    Attributes:
        broken: indices of training images that could not be decoded, as far as this process met them.
    """

    name, metric, higher_is_better = "vision", "top1", True

    def __init__(self, settings: VisionSettings, sets: ImageSets) -> None:
        self.sets = sets
        classes = settings.num_classes if sets.train is None else len(sets.train.classes)
        self.settings = dataclasses.replace(settings, num_classes=classes)
        self.broken = set[int]() if sets.train is None else set(sets.train.broken)

    def build_model(self) -> nn.Module:
        return build(self.settings)

    def stream(self, process: Process) -> TrainingStream:
        s, train = self.settings, self.sets.train
        augmentation = Augmentation(
            scale=(s.crop_scale[0], s.crop_scale[-1]),
            color_jitter=s.color_jitter,
            randaugment=s.randaugment,
            erasing=s.erasing,
        )
        transform = training_transform(s.size, augmentation, **normalisation(s))
        if train is None:
            data = open_stream(s.source, s.data, s.train_split, batch_size=s.part_size, training=True, seed=s.seed)
            data.transform = transform
            share = s.part_size // process.count
            described = stream_fingerprint(s.source, s.data)
            return StreamedImages(data, share, self._mix(share), seed=s.seed, workers=s.workers, described=described)
        return LoaderStream(
            Augmented(train, transform),
            repeated(len(train), s.part_size, s.seed, s.repeats),
            seed=s.seed,
            process=process,
            collate=Mixed(self._mix(s.part_size // process.count)),
            workers=s.workers,
            described=self.sets.described(),
        )

    def loss(self, model: nn.Module, batch: ImageBatch) -> Tensor:
        self.broken.update(batch.broken)
        logits = model(batch.pixels).float()
        if batch.targets.dim() == 2:  # mixed targets are smoothed already
            return F.cross_entropy(logits, batch.targets)
        return F.cross_entropy(logits, batch.targets, label_smoothing=self.settings.label_smoothing)

    def evaluate(self, model: nn.Module, process: Process) -> Sums:
        right1 = right5 = seen = 0
        device = next(model.parameters()).device
        for pixels, labels in evaluation_loader(self._evaluated(process), workers=self.settings.workers):
            one, five = count_right(model(pixels.to(device)), labels.to(device))
            right1, right5, seen = right1 + one, right5 + five, seen + len(labels)
        return {"top1": (right1, seen), "top5": (right5, seen)}

    def _evaluated(self, process: Process) -> Dataset[Any]:
        """This process's share of the evaluated split."""
        s = self.settings
        transform = evaluation_transform(s.size, s.crop, **normalisation(s))
        if self.sets.val is None:  # timm's readers share the source among the processes themselves
            streamed = open_stream(s.source, s.data, s.val_split, batch_size=s.part_size, training=False, seed=s.seed)
            streamed.transform = transform
            return streamed
        data = Transformed(self.sets.val, transform)
        return Subset(data, range(process.index, len(data), process.count))

    def broken_files(self) -> list[str]:
        """The images that could not be decoded, by name."""
        train, val = self.sets.train, self.sets.val
        names = [train.name(index) for index in sorted(self.broken)] if train is not None else []
        return names + ([val.name(index) for index in sorted(val.broken)] if val is not None else [])

    def _mix(self, images: int) -> Mix | None:
        """Mixing of batches of so many images."""
        s = self.settings
        if not s.mixup and not s.cutmix:
            return None
        if images % 2:
            raise ValueError(
                f"mixup and cutmix mix images in pairs: a process loads {images} at once, which must be even. Choose "
                "another batch_size or accumulate, or mixup=0 and cutmix=0."
            )
        from timm.data import Mixup

        return Mixup(s.mixup, s.cutmix, label_smoothing=s.label_smoothing, num_classes=s.num_classes)


def evaluate_trained(
    trained: Trained,
    images: ImageSettings,
    *,
    drop: Sequence[float] = (),
    patch_size: int = 16,
    batch_size: int = 128,
    workers: int = 0,
    progress: Progress | None = None,
) -> tuple[Evaluation, list[str]]:
    """A trained model on a split, at the size it was trained with; also the files that could not be decoded.

    Raises:
        ValueError: the split has another number of classes than the model.
    """
    s = trained.settings
    assert s.num_classes is not None
    split = open_validation(images, s.num_classes)
    data = Transformed(split, evaluation_transform(s.size, s.crop, **normalisation(s)))
    judged = evaluate(
        trained.model,
        evaluation_loader(data, batch_size, workers),
        drop=drop,
        patch_size=patch_size,
        progress=progress,
    )
    return judged, [split.name(index) for index in sorted(split.broken)]


def normalisation(settings: VisionSettings) -> dict[str, Any]:
    """Interpolation, mean and deviation that timm's configuration of the model states."""
    from .. import models  # noqa: F401  registers lotformer's own

    # isort: split
    from timm.data import resolve_data_config
    from timm.models import get_pretrained_cfg

    known = get_pretrained_cfg(settings.model, allow_unregistered=True)
    config = resolve_data_config({}, pretrained_cfg=known.to_dict() if known is not None else {})
    return {name: config[name] for name in ("interpolation", "mean", "std")}
