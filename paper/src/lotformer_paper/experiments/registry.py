"""The experiments by name: a line each."""

from __future__ import annotations

from importlib import import_module

from .engine import Experiment

_MODULES = (
    "glue",
    "stsb",
    "balance",
    "survival.anatomy",
    "survival.speed",
    "survival.vision",
    "survival.retrieval",
    "survival.translation",
    "longrange.table",
    "longrange.search",
    "longrange.throughput",
    "longrange.pathfinder_check",
    "translation.table",
    "translation.speed",
    "vision.imagenet",
    "vision.ladder",
    "vision.sinkhorn",
    "vision.rank",
    "vision.robustness",
    "vision.gap",
)
"""Each declares its `EXPERIMENT`; in the order of the command line's help."""

EXPERIMENTS: dict[str, Experiment] = {
    made.name: made for made in (import_module(f".{module}", __package__).EXPERIMENT for module in _MODULES)
}
