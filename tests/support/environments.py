"""Environments with some of the installed packages only, as `pip install 'lotformer[…]'` makes them."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

SOURCE = Path(__file__).parents[2] / "src"
PAPER = Path(__file__).parents[2] / "paper" / "src"


def environment(folder: Path, *extras: str) -> Path:
    """A folder with our dependencies, those of the extras, the paper's commands, and nothing else: links, at once."""
    folder.mkdir()
    about = Path(str(metadata.distribution("lotformer-paper").locate_file("")))
    for path in about.glob("lotformer_paper-*.dist-info"):  # its commands are part of ours
        (folder / path.name).symlink_to(path)
    needed = {"setuptools", *(name for extra in ("", *extras) for name in _requirements("lotformer", extra))}
    for name in _closure(needed):
        for path in {Path(file).parts[0] for file in metadata.distribution(name).files or ()}:
            place = Path(str(metadata.distribution(name).locate_file(path)))
            if path not in ("..", "__pycache__") and place.exists() and not (folder / path).exists():
                (folder / path).symlink_to(place)
    return folder


def run(folder: Path, *arguments: str, source: Path = SOURCE) -> subprocess.CompletedProcess[str]:
    """Python with the packages of an environment and this package, without those that are installed here."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(source), str(PAPER), str(folder))), "COLUMNS": "200"}
    command = [sys.executable, "-S", *arguments]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=300)


def _requirements(distribution: str, extra: str) -> list[str]:
    found = [Requirement(line) for line in metadata.requires(distribution) or ()]
    named = [r for r in found if r.marker is None or r.marker.evaluate({"extra": extra})]
    own = [
        again for r in named if r.name == distribution for inner in r.extras for again in _requirements(r.name, inner)
    ]
    return [r.name for r in named if r.name != distribution] + own


def _closure(names: set[str]) -> set[str]:
    seen: set[str] = set()
    while names:
        name = names.pop()
        key = name.lower().replace("_", "-")
        if key in seen:
            continue
        try:
            metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # of another platform or an extra that is not installed here
        seen.add(key)
        names |= set(_requirements(name, ""))
    return seen
