"""Run time over the length of the sequence, both axes logarithmic: quadratic mechanisms left, linear ones right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..results import figures


@dataclass(frozen=True)
class Point:
    """Time of one call at one length; `skipped` says why there is none."""

    label: str
    mechanism: str
    panel: str
    n: int
    milliseconds: float | None
    median_milliseconds: float | None = None
    repeats: int = 0
    skipped: str | None = None


def draw_runtime(points: Sequence[Point], unit: str, title: str, stem: Path) -> list[Path]:
    """Write a .png and an .svg and return them. LOT is in both panels: black, the darker the smaller its rank."""
    pyplot = figures.pyplot()
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    lot = [p for p in points if p.mechanism == "lot"]
    others = [p for p in points if p.mechanism != "lot"]
    for axis, panel in zip(axes, ("quadratic", "linear"), strict=True):
        mine = _curves([p for p in others if p.panel == panel])
        colours = pyplot.get_cmap("turbo")
        for position, (label, points) in enumerate(mine.items()):
            colour = None if len(mine) <= 10 else colours(position / (len(mine) - 1))
            _plot(axis, points, label=label, color=colour, marker="o", markersize=3, linewidth=1)
        curves = _curves(lot)
        for position, (label, points) in enumerate(curves.items()):
            _plot(axis, points, label=label, color=str(0.75 * position / max(1, len(curves) - 1)), linewidth=2)
        axis.set(title=f"against {panel} mechanisms", xlabel="tokens", xscale="log", yscale="log")
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize=7 if len(mine) <= 10 else 5, ncols=1 if len(mine) <= 10 else 2)
    axes[0].set_ylabel(unit)
    figure.suptitle(title, fontsize=8)
    return figures.save(figure, stem)


def _curves(points: list[Point]) -> dict[str, list[Point]]:
    curves: dict[str, list[Point]] = {}
    for point in points:
        if point.milliseconds is not None:
            curves.setdefault(point.label, []).append(point)
    return curves


def _plot(axis: Any, points: list[Point], **style: Any) -> None:
    axis.plot([p.n for p in points], [p.milliseconds for p in points], **style)
