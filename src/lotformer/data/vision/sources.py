"""Open a set of images through timm and read it so that a broken file is noted, not fatal."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import _torchvision

if TYPE_CHECKING:
    from PIL.Image import Image

Sample = tuple["Image", int]

_BROKEN = (OSError, SyntaxError, ValueError, EOFError, struct.error)  # what Pillow raises on damaged files
_ATTEMPTS = 20


class Images:
    """Labelled RGB images by index.

    A file that cannot be decoded is skipped in favour of the next one, and its index is in `broken` from then on;
    `name` tells which file that is.

    Args:
        load: the image and its label at an index; raises as Pillow does where the file is damaged.
        classes: names of the classes in the order of their labels, empty if the source does not tell.
    """

    def __init__(
        self, load: Callable[[int], Sample], length: int, classes: list[str], name: Callable[[int], str]
    ) -> None:
        self._load, self._length, self.classes, self.name = load, length, classes, name
        self.broken: set[int] = set()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        first = index
        for _ in range(min(_ATTEMPTS, len(self))):
            try:
                return self._load(index)
            except _BROKEN:
                self.broken.add(index)
                index = (index + 1) % len(self)
        raise ValueError(f"{self.name(first)} and the files after it cannot be decoded: this is not a set of images.")


def open_images(source: str, folder: Path | None, split: str) -> Images:
    """A split of a set that can be read in any order.

    Args:
        source: "" for `folder/<split>/<class>/*` or a tar file, or timm's name of a set: "hfds/cifar10",
            "torch/cifar10", …
        folder: where it is; for Hugging Face, where it is kept.
        split: "train", "validation", …; timm's synonyms are understood.

    Raises:
        FileNotFoundError: there is no such folder, or no such split in it.
        ValueError: it holds no images, or the source can only be streamed.
    """
    if source.startswith(STREAMED):
        raise ValueError(f"{source} can only be streamed, not read in any order: use `open_stream`.")
    data = _create(source, folder, split)
    if hasattr(data, "reader"):
        reader = data.reader
        labels = getattr(reader, "class_to_idx", {}) or {}
        return Images(
            lambda index: _decoded(*reader[index][:2]),
            len(reader),
            sorted(labels, key=labels.__getitem__),
            lambda index: str(reader.filename(index)),
        )
    return Images(
        lambda index: (data[index][0].convert("RGB"), int(data[index][1])),
        len(data),
        list(getattr(data, "classes", [])),
        lambda index: f"image {index}",
    )


STREAMED = ("wds/", "hfids/", "tfds/")
"""Sources that come in an order of their own."""


def open_stream(source: str, folder: Path | None, split: str, *, batch_size: int, training: bool, seed: int) -> Any:
    """timm's iterable data set of a streamed source, e.g. "wds/imagenet" over the shards in `folder`."""
    return _create(source, folder, split, batch_size=batch_size, is_training=training, seed=seed)


def _create(source: str, folder: Path | None, split: str, **options: Any) -> Any:
    _torchvision.prepare()
    from timm.data import create_dataset

    if not source:
        if folder is None:
            raise FileNotFoundError("no images: give the folder that holds train/ and val/ with --data.")
        if not folder.exists():
            raise FileNotFoundError(f"{folder} does not exist: --data expects a folder that holds train/ and val/.")
    try:
        return create_dataset(source, root=None if folder is None else str(folder), split=split, **options)
    except RuntimeError as error:  # timm's word for an empty folder, and for a package that a source needs
        raise ValueError(f"{source or folder}, split {split!r}: {error}") from error


def _decoded(file: Any, label: int) -> Sample:
    from PIL import Image

    with file:
        return Image.open(file).convert("RGB"), int(label)
