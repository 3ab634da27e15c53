"""What every result carries, and how it is written."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import __version__


@dataclass(frozen=True)
class Provenance:
    """Where a result comes from: enough to judge it and to make it again."""

    command: str
    date: str
    machine: str
    cpu: str
    cores: int
    threads: int
    seed: int
    python: str
    torch: str
    lotformer: str


def provenance(command: str, *, threads: int, seed: int) -> Provenance:
    return Provenance(
        command=command,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        machine=f"{platform.system()} {platform.machine()}",
        cpu=cpu_model(),
        cores=os.cpu_count() or 1,
        threads=threads,
        seed=seed,
        python=platform.python_version(),
        torch=torch.__version__,
        lotformer=__version__,
    )


def cpu_model() -> str:
    """The processor's name, and the instruction set that PyTorch uses on it."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        name = models[0] if models else name
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def write_json(result: Any, path: Path) -> None:
    """Write a dataclass as JSON; a reader never sees half a file."""
    write_text(json.dumps(dataclasses.asdict(result), indent=1) + "\n", path)


def write_text(text: str, path: Path) -> None:
    """Write a whole file or nothing: a reader never sees half of it, nor do two writers mix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=path.suffix, delete=False, encoding="utf-8") as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)
