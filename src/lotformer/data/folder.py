"""The data folder: unpacked sets in a folder that the user names; nothing is downloaded."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "LOTFORMER_DATA"


def data_folder(given: str | Path | None = None, wanted: str = "unpacked data sets") -> Path:
    """The folder given, or the one in `LOTFORMER_DATA`, or an error that says what it should hold."""
    named = given if given is not None else os.environ.get(VARIABLE)
    if not named:
        raise FileNotFoundError(f"no data folder: pass --data-dir or set {VARIABLE} to a folder that holds {wanted}.")
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder: pass --data-dir or set {VARIABLE} to one with {wanted}.")
    return folder
