"""Checkpoints of a run: one file that is always whole, and that knows which run it belongs to."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .fingerprints import differences

_FORMAT = 1
_ABANDONED = 600  # seconds without a write after which a partial file belongs to nobody


class Checkpoint:
    """A file that a run writes to and resumes from.

    A new state is written beside the old one under a name of its own, flushed to disk and renamed: whatever happens,
    `path` holds one whole state, and several processes may write to it.

    Args:
        path: the file; its folder must exist.
        belongs_to: nested plain data that describes the run. `read` refuses the file of another one.
    """

    def __init__(self, path: str | Path, belongs_to: Mapping[str, Any]) -> None:
        self.path, self.belongs_to = Path(path), dict(belongs_to)
        check_writable(self.path)
        for partial in self.path.parent.glob(f"{self.path.name}.*.partial"):
            if time.time() - partial.stat().st_mtime > _ABANDONED:
                partial.unlink(missing_ok=True)

    def write(self, state: Mapping[str, Any]) -> None:
        """Replace what the file holds.

        Raises:
            OSError: the state could not be written (disk full, folder read-only); the previous one is still there.
        """
        content = {"format": _FORMAT, "belongs_to": self.belongs_to, "state": dict(state)}
        partial = self.path.with_name(f"{self.path.name}.{secrets.token_hex(6)}.partial")
        try:
            with open(partial, "xb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, self.path)
            _sync_folder(self.path.parent)
        except (OSError, RuntimeError) as error:  # torch reports a failed write as either
            partial.unlink(missing_ok=True)
            kept = "the previous checkpoint is intact" if self.path.exists() else "there was none before it"
            raise OSError(
                f"the checkpoint {self.path} could not be written ({_reason(error)}); {kept}. "
                "Free some space or give another path, and start again to resume."
            ) from error
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def read(self) -> dict[str, Any] | None:
        """The state in the file, None if there is no file.

        Raises:
            ValueError: it is not a checkpoint, or belongs to another run; the message names what differs.
        """
        if not self.path.exists():
            return None
        try:
            content = torch.load(self.path, map_location="cpu", weights_only=True)
            version, belongs_to, state = content["format"], content["belongs_to"], content["state"]
        except Exception as error:
            raise ValueError(f"{self.path} is not a checkpoint, or is damaged. Delete it to start over.") from error
        if version != _FORMAT:
            raise ValueError(
                f"{self.path} has checkpoint format {version}, this version reads {_FORMAT}. Delete it to start over."
            )
        self.refuse_if(differences(self.belongs_to, belongs_to))
        return state

    def refuse_if(self, difference: str) -> None:
        """Raise the error for a file that belongs to another run, unless `difference` is empty."""
        if difference:
            raise ValueError(
                f"{self.path} belongs to another run: {difference}. "
                "Give what it was made with to resume, another path to keep it, or delete it to start over."
            )


def check_writable(path: Path) -> None:
    """Notice before the work begins that a file cannot be written.

    Raises:
        OSError: the folder is missing or read-only, or the path is a folder.
    """
    folder = path.parent
    if not folder.is_dir():
        raise FileNotFoundError(f"the folder {folder} for the checkpoint {path.name} does not exist: create it first.")
    if path.is_dir():
        raise IsADirectoryError(f"the checkpoint {path} is a folder: expected the path of a file.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"the folder {folder} for the checkpoint {path.name} is read-only: give another path.")


def _sync_folder(folder: Path) -> None:
    """Make the rename last through a power cut, where folders can be opened (not on Windows)."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _reason(error: BaseException) -> str:
    """The first line of an error: torch's go on with a stack."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text.splitlines()[0].rstrip(".")
