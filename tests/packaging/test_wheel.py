"""A wheel says by its tag whether the compiled kernel is in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def build(folder: Path, *, compiler: str) -> Path:
    """A wheel from a copy of the sources, by this environment and without network."""
    ignore = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "src", ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    command = [sys.executable, "-m", "pip", "wheel", ".", "-q", "-w", "dist", "--no-deps", "--no-build-isolation",
               "--no-index", "--disable-pip-version-check"]  # fmt: skip
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "CC": compiler, "CXX": compiler}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (folder / "dist").iterdir()
    return wheel


@pytest.mark.skipif(sys.platform not in {"linux", "darwin"}, reason="the kernel is compiled on Linux and macOS")
def test_without_a_compiler_the_wheel_is_pure(tmp_path):
    wheel = build(tmp_path, compiler="/bin/false")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
        (about,) = (name for name in names if name.endswith(".dist-info/WHEEL"))
        assert "Root-Is-Purelib: true" in content.read(about).decode()
    assert "lotformer/ops/attention.py" in names
    assert "lotformer/py.typed" in names
    assert not [name for name in names if name.endswith(".so")]


@pytest.mark.skipif(sys.platform != "linux", reason="a stand-in for the compiler is a shell script")
def test_with_the_kernel_it_is_not(tmp_path):
    """The compiler is a script that writes empty objects: the tag is the question, not the kernel."""
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != "-o" ]; do shift; done; : > "$2"\n')
    compiler.chmod(0o755)
    (tmp_path / "project").mkdir()
    wheel = build(tmp_path / "project", compiler=str(compiler))
    assert "-cp310-abi3-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
