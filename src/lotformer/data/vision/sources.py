"""Open a set of images through timm and read it so that a broken file is noted, not fatal."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...reading import decoding, require_file
from ..contents import files_digest
from ..images import decoded_image

if TYPE_CHECKING:
    from PIL.Image import Image

Sample = tuple["Image", int]
Progress = Callable[[int, int], None]
"""Called with the images read and the images in all."""

_BROKEN = (OSError, ValueError)  # what files that cannot be read, or not be decoded, raise
_ATTEMPTS = 20


class Images:
    """Labelled RGB images by index.

    A file that cannot be decoded is skipped in favour of the next one, and its index is in `broken` from then on;
    `name` tells which file that is.

    Args:
        load: the image and its label at an index; raises ValueError or OSError where the file is damaged.
        content: the bytes of the file and the label at an index, or the pixels where there is no file.
        classes: names of the classes in the order of their labels, empty if the source does not tell.
    """

    def __init__(
        self,
        load: Callable[[int], Sample],
        content: Callable[[int], tuple[bytes, int]],
        length: int,
        classes: list[str],
        name: Callable[[int], str],
    ) -> None:
        self._load, self._content, self._length, self.classes, self.name = load, content, length, classes, name
        self.broken: set[int] = set()
        self._fingerprint: str | None = None

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

    def fingerprint(self, progress: Progress | None = None) -> str:
        """16 digits that are equal for equal classes, labels and contents of files in the same order.

        Every file is read once, the first time. Where the files are, and how they are packed, does not matter.
        """
        if self._fingerprint is None:
            whole = hashlib.sha256(repr(self.classes).encode())
            for index in range(len(self)):
                try:
                    content, label = self._content(index)
                    whole.update(f"{label} {hashlib.sha256(content).hexdigest()}\n".encode())
                except _BROKEN:  # it will be skipped
                    whole.update(b"unreadable\n")
                if progress is not None:
                    progress(index + 1, len(self))
            self._fingerprint = whole.hexdigest()[:16]
        return self._fingerprint

    def moved(self, load: Callable[[int], Sample]) -> Images:
        """The same images from elsewhere, e.g. from memory; their fingerprint is that of the files as they are now."""
        made = Images(load, self._content, len(self), self.classes, self.name)
        made.broken, made._fingerprint = self.broken, self.fingerprint()
        return made


def open_images(source: str, folder: Path | None, split: str) -> Images:
    """A split of a set that can be read in any order.

    Args:
        source: "" for `folder/<split>/<class>/*` or a tar file, or timm's name of a set: "hfds/cifar10",
            "torch/cifar10", …
        folder: where it is; for Hugging Face, where it is kept.
        split: "train", "validation", …; timm's synonyms are understood.

    Raises:
        FileNotFoundError: there is no such folder, or no such split in it.
        ValueError: it holds no images, or is a damaged tar file, or the source can only be streamed.
    """
    if source.startswith(STREAMED):
        raise ValueError(f"{source} can only be streamed, not read in any order: use `open_stream`.")
    data = _create(source, folder, split)
    if not hasattr(data, "reader"):
        return _pictures(data)
    reader = data.reader
    # tar files have another name for it
    labels = getattr(reader, "class_to_idx", None) or getattr(reader, "class_name_to_idx", None) or {}

    def name(index: int) -> str:
        return str(reader.filename(index))

    def content(index: int) -> tuple[bytes, int]:
        place = reader.samples[index][0] if hasattr(reader, "samples") else None
        if isinstance(place, str):  # timm would open a pipe too, and wait
            require_file(Path(place))
        with decoding(name(index), "an image"):
            file, label = reader[index][:2]
            with file:
                return file.read(), int(label)

    def load(index: int) -> Sample:
        data, label = content(index)
        return decoded_image(io.BytesIO(data), name(index)), label

    return Images(load, content, len(reader), sorted(labels, key=labels.__getitem__), name)


def _pictures(data: Any) -> Images:
    """torchvision's sets, which give pictures and not files."""

    def name(index: int) -> str:
        return f"image {index}"

    def load(index: int) -> Sample:
        with decoding(name(index), "an image"):
            return data[index][0].convert("RGB"), int(data[index][1])

    def content(index: int) -> tuple[bytes, int]:
        image, label = load(index)
        return repr(image.size).encode() + image.tobytes(), label

    return Images(load, content, len(data), list(getattr(data, "classes", [])), name)


STREAMED = ("wds/", "hfids/", "tfds/")
"""Sources that come in an order of their own."""


def open_stream(source: str, folder: Path | None, split: str, *, batch_size: int, training: bool, seed: int) -> Any:
    """timm's iterable data set of a streamed source, e.g. "wds/imagenet" over the shards in `folder`."""
    return _create(source, folder, split, batch_size=batch_size, is_training=training, seed=seed)


def stream_fingerprint(source: str, folder: Path | None) -> str:
    """The name of a streamed source, and a digest of its files where they are at hand."""
    kind, _, name = source.partition("/")
    places = {"wds": folder, "tfds": folder and folder / name}  # other folders are caches of what is far away
    place = places.get(kind)
    if place is None or not place.is_dir():
        return source
    return f"{source}, {files_digest(place, (path for path in place.rglob('*') if path.is_file()))[:16]}"


def _create(source: str, folder: Path | None, split: str, **options: Any) -> Any:
    from timm.data import create_dataset

    if not source:
        if folder is None:
            raise FileNotFoundError("no images: give the folder that holds train/ and val/ with --data.")
        if not folder.exists():
            raise FileNotFoundError(f"{folder} does not exist: --data expects a folder that holds train/ and val/.")
        if folder.suffix == ".tar" and folder.is_file():
            _require_whole(folder)
    try:
        return create_dataset(source, root=None if folder is None else str(folder), split=split, **options)
    except RuntimeError as error:  # timm's word for an empty folder, and for a package that a source needs
        raise ValueError(f"{source or folder}, split {split!r}: {error}") from error


def _require_whole(path: Path) -> None:
    """Refuse a tar file that is cut off, or whose headers are damaged: `tarfile` takes either for its end.

    Raises:
        ValueError: it does not go on to its end, which is a block of zeros.
    """
    with decoding(path, "a tar file"), tarfile.open(path, "r:") as archive:
        archive.getmembers()
        assert archive.fileobj is not None
        archive.fileobj.seek(archive.offset)
        if archive.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise ValueError(f"expected the header of another file, or the end, at byte {archive.offset}")
