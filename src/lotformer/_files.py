"""Files and folders that appear whole or not at all, with the permissions of the user's umask."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def write_json(result: Any, path: Path) -> None:
    """Write a dataclass as JSON."""
    write_text(json.dumps(dataclasses.asdict(result), indent=1) + "\n", path)


def write_text(text: str, path: Path) -> None:
    write_bytes(text.encode(), path)


def write_bytes(content: bytes, path: Path) -> None:
    with new_file(path) as draft, open(draft, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A path beside the old file to write to; it takes its place when the block ends, and is dropped if that fails.

    A reader never sees half a file, nor do two writers mix. Other libraries may write it: it gets the permissions of
    the umask all the same.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = _draft(path)
    try:
        yield draft
        draft.chmod(_mode(path.parent))
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill; it takes the place of `path` when the block ends, and is dropped if the block fails.

    Other libraries may write into it: their files get the permissions of the umask too.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = _draft(path)
    draft.mkdir()
    try:
        yield draft
        mode = _mode(draft)
        for file in draft.rglob("*"):
            if file.is_file():
                file.chmod(mode)
        old = _draft(path)
        if path.exists():
            path.rename(old)
        draft.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def require_writable(folder: Path) -> None:
    """Find out before the work begins, not after it, that a result could not be stored.

    Raises:
        OSError: the folder cannot be made or written to.
    """
    probe = folder / ".writable"
    try:
        write_bytes(b"", probe)
        probe.unlink()
    except OSError as error:
        raise OSError(f"cannot write to {folder}: {error.strerror or error}. Choose another --out.") from error


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")


def _mode(folder: Path) -> int:
    """The permissions of a new file; asking the umask itself would mean changing it, for all threads."""
    probe = folder / f".mode-{secrets.token_hex(4)}"
    probe.touch(0o666)
    try:
        return probe.stat().st_mode & 0o777
    finally:
        probe.unlink()
