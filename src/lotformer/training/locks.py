"""One run per folder: a lock that the operating system takes back when its process ends, however it ends."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

LOCK = ".lock"
"""The file in the folder of a run that is locked. It stays, empty, after the run: removing it would be a race."""

_FAR = 1 << 30  # the byte that is locked, beyond the text: on Windows nobody else could read a byte that is
_TAKEN = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)

_guard = threading.Lock()
_ours: set[tuple[int, int, int]] = set()  # process, device, inode: the locks of POSIX do not keep out one's own threads


@contextlib.contextmanager
def holding(folder: Path) -> Iterator[None]:
    """Hold a folder while inside; the lock file names who does. Processes forked meanwhile do not hold it.

    Raises:
        BlockingIOError: another run holds it.
    """
    found = folder.stat()
    key = os.getpid(), found.st_dev, found.st_ino
    with _guard:
        if key in _ours:  # nor may the file be opened: closing it would end the lock
            raise _taken(folder, f"another run of this process ({os.getpid()})")
        file = open(folder / LOCK, "a+", encoding="utf-8")  # noqa: SIM115  held for as long as the lock
        try:
            _lock(file, folder)
        except BaseException:
            file.close()
            raise
        _ours.add(key)
    try:
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
        _write(file, json.dumps(owner))
        yield
    finally:
        with _guard:
            _ours.discard(key)
            with contextlib.suppress(OSError):
                _write(file, "")
            file.close()


def _lock(file: IO[str], folder: Path) -> None:
    try:
        if sys.platform == "win32":
            file.seek(_FAR)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _FAR)
    except OSError as error:
        if error.errno in _TAKEN:
            raise _taken(folder, _owner(file)) from None
        warnings.warn(
            f"{folder} cannot be locked ({error.strerror}): make sure that no other run writes to it.", stacklevel=5
        )


def _write(file: IO[str], text: str) -> None:
    file.truncate(0)
    file.write(text)
    file.flush()


def _owner(file: IO[str]) -> str:
    """Describe the holder of the lock, which may not have written its name yet."""
    file.seek(0)
    try:
        told = json.loads(file.read())
        return f"process {told['pid']} on {told['host']}, since {told['started']}"
    except (ValueError, LookupError, TypeError):
        return "another process"


def _taken(folder: Path, owner: str) -> BlockingIOError:
    return BlockingIOError(
        f"the folder {folder} is in use by {owner}. Wait for it or end it to go on there, or choose another folder."
    )
