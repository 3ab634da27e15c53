"""A disk without room, for as long as it takes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

needs_limits = pytest.mark.skipif(sys.platform == "win32", reason="a limit on file sizes stands for a full disk")


@contextmanager
def full_disk(room: int = 9000) -> Iterator[None]:
    """Writing fails in files of more than `room` bytes."""
    import resource  # not on Windows

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
