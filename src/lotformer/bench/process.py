"""Memory of the whole process, as the kernel of the operating system counts it: scratch inside C++ included."""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def can_measure_peak() -> bool:
    """Whether the high-water mark of this process can be read and reset (Linux)."""
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
