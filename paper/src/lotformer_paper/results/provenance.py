"""Provenance of a result: enough to judge it and to make it again."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import lotformer
from lotformer.machine import cpu_model

PACKAGES = (
    "torch", "numpy", "transformers", "tokenizers", "safetensors", "sentence-transformers", "timm", "torchvision",
    "accelerate", "datasets", "torchmetrics", "triton", "onnxruntime",
)  # fmt: skip
"""Packages that a number may depend on."""


@dataclass(frozen=True)
class Provenance:
    """`versions`: of what is installed. `commit`: of the code, where it is run from a repository. `budget`: what was
    spent, e.g. the steps that were really taken. `note`: what a reader has to know besides.
    """

    command: str
    date: str | None
    machine: str | None
    cpu: str | None
    cores: int | None
    threads: int
    seed: int
    versions: dict[str, str]
    commit: str | None = None
    budget: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    def where(self) -> str:
        """Machine and versions in one line."""
        if self.cpu is None:
            place = "machine not recorded"
        else:
            threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
            place = f"{self.cpu}, {self.cores} cores, {threads}"
        named = ("torch", "transformers", "lotformer")
        versions = [f"{name} {self.versions[name]}" for name in named if name in self.versions]
        if self.commit:
            versions.append(f"commit {self.commit[:10]}{'-dirty' * self.commit.endswith('-dirty')}")
        return "; ".join(part for part in (place, ", ".join(versions), self.note) if part)


def provenance(command: str, *, threads: int, seed: int, budget: Mapping[str, Any] | None = None) -> Provenance:
    return Provenance(
        command=command,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        machine=f"{platform.system()} {platform.machine()}",
        cpu=cpu_model(),
        cores=os.cpu_count() or 1,
        threads=threads,
        seed=seed,
        versions=versions(),
        commit=commit(),
        budget=dict(budget or {}),
    )


@contextmanager
def thread_count(threads: int) -> Iterator[None]:
    """Run with this many threads and put the old number back."""
    if threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}.")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def versions() -> dict[str, str]:
    """Python, lotformer, and those of `PACKAGES` that are installed."""
    found = {"python": platform.python_version(), "lotformer": lotformer.__version__}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit of this code, with "-dirty" if it was changed since; None outside a repository that holds it."""
    here = Path(__file__).parent
    if _git(here, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None  # e.g. installed below somebody else's repository
    head = _git(here, "rev-parse", "HEAD")
    parts = (here.parent, Path(lotformer.__file__).parent)
    changed = any(_git(part, "status", "--porcelain", "--untracked-files=no", "--", ".") for part in parts)
    return f"{head}-dirty" if changed else head


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        run = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True)
    except OSError:
        return None
    return run.stdout.strip() if run.returncode == 0 else None
