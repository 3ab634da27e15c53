"""Figures: matplotlib is imported when one is drawn, and files are written whole."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import Any

from lotformer.files import write_bytes

MISSING = "figures need matplotlib: pip install 'lotformer[figures]'"


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def pyplot() -> Any:
    """`matplotlib.pyplot` on a canvas without a window."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(f"{MISSING}.") from error
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "lotformer"  # the same figure gives the same file
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, stem: Path, *, dpi: int = 150) -> list[Path]:
    """Write a figure as .png and .svg and close it; returns the two files."""
    files = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg")]
    for file in files:
        drawn = io.BytesIO()
        svg = file.suffix == ".svg"
        figure.savefig(drawn, format=file.suffix[1:], dpi=dpi, metadata={"Date": None} if svg else None)
        write_bytes(drawn.getvalue(), file)
    pyplot().close(figure)
    return files
