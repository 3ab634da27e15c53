"""Sources of a result, by content: the same path may hold other weights tomorrow."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lotformer.data.contents import files_digest, sha256

_CHECKPOINT = {".json", ".safetensors", ".bin", ".pt", ".txt", ".model"}


@dataclass(frozen=True)
class Source:
    """Files by a name for people and the SHA-256 of their names and contents."""

    name: str
    sha256: str


def checkpoint_source(folder: Path) -> Source:
    """The weights, configuration and vocabulary in a folder."""
    files = [path for path in folder.iterdir() if path.is_file() and path.suffix in _CHECKPOINT]
    return files_source("/".join(folder.resolve().parts[-2:]), files)


def files_source(name: str, files: Iterable[Path]) -> Source:
    """These files, in whatever order; where they are does not matter. Those of one name count in their order."""
    whole = hashlib.sha256()
    for path in sorted(files, key=lambda path: path.name):
        whole.update(f"{path.name}\0{sha256(path)}\n".encode())
    return Source(name, whole.hexdigest())


def folder_source(folder: Path, files: Iterable[Path]) -> Source:
    """Files below a folder whose paths in it matter too: the folder of an image is its class."""
    return Source(folder.name, files_digest(folder, files))
