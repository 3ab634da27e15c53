"""Data sets that Hugging Face's `datasets` has saved to disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..reading import decoding


def saved_dataset(folder: Path) -> Any:
    """The splits of a saved data set by name.

    Raises:
        ValueError: the folder holds no such set, or a damaged one.
    """
    try:
        from datasets import load_from_disk
    except ImportError as error:
        raise ImportError(f"{folder} is a saved data set: reading it needs `pip install datasets`.") from error
    with decoding(folder, "a data set saved by Hugging Face"):
        return load_from_disk(str(folder))


def saved_files(folder: Path) -> list[Path]:
    """The files that hold its contents."""
    return sorted(path for path in folder.rglob("*") if path.suffix in {".arrow", ".json"})
