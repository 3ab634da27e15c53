"""The machine that this runs on."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def cpu_model() -> str:
    """The processor's name, and the instruction set that PyTorch uses on it."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        name = models[0] if models else name
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"
