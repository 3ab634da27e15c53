"""Images from files that may be damaged, or be no images at all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..reading import decoding, require_file

if TYPE_CHECKING:
    from PIL.Image import Image


def open_image(path: Path, mode: str = "RGB") -> Image:
    """The image in a file, decoded.

    Raises:
        OSError: there is no such file, or it is a folder, a pipe or a device.
        ValueError: it cannot be decoded, or has more pixels than Pillow allows.
    """
    require_file(path)
    with path.open("rb") as file:
        return decoded_image(file, str(path), mode)


def decoded_image(file: Any, name: str, mode: str = "RGB") -> Image:
    """The image in an open file; `name` is for errors."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("reading images needs Pillow: pip install 'lotformer[vision]'.") from error

    with decoding(name, "an image"), Image.open(file) as image:
        return image.convert(mode)
