"""Memory of the whole process, as the kernel of the operating system counts it: scratch inside C++ included."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def can_measure_peak() -> bool:
    """True if the high-water mark of this process can be read and reset (Linux)."""
    return _STATUS.exists() and _CLEAR.exists()


def resident() -> int:
    """Bytes of memory in use now."""
    return _read("VmRSS")


def reset_peak() -> None:
    """Forget the high-water mark: it starts again from what is in use now."""
    _CLEAR.write_text("5")


def peak() -> int:
    """Bytes of memory in use at most since `reset_peak`."""
    return _read("VmHWM")


def available() -> int | None:
    """Bytes of memory that could still be used on this machine, where that is known."""
    info = Path("/proc/meminfo")
    if not info.exists():
        return None
    line = next(line for line in info.read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024


def _read(key: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # parameters of glibc's mallopt
_DEFAULTS = {_TRIM_THRESHOLD: 128 << 10, _MMAP_MAX: 65536}


@contextmanager
def memory_kept() -> Iterator[None]:
    """While inside, memory freed by one call serves the next; afterwards it goes back to the system. glibc only."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        set_option, give_back = libc.mallopt, libc.malloc_trim
    except (OSError, AttributeError):
        yield
        return
    set_option(_TRIM_THRESHOLD, 2**31 - 1)
    set_option(_MMAP_MAX, 0)
    try:
        yield
    finally:
        for option, value in _DEFAULTS.items():
            set_option(option, value)
        give_back(0)
