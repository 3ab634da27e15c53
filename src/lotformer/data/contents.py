"""Data by content: the same path may hold other data tomorrow."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from ..reading import require_file


def sha256(path: Path) -> str:
    """Of a file's content."""
    require_file(path)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def files_digest(root: Path, files: Iterable[Path]) -> str:
    """One SHA-256 of the contents of files and of their paths below `root`, in whatever order they are given.

    Paths count because folders often say what is in a file: the class of an image, the sentiment of a text.
    """
    whole = hashlib.sha256()
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in files):
        whole.update(f"{name}\0{sha256(path)}\n".encode())
    return whole.hexdigest()
