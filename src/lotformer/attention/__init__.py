"""Attention mechanisms: one file each, one interface, one registry."""

from .base import Attention, Cost, Entry
from .config import Content, LocalConv, LOTConfig, Newton, Pivots, Prefix, Sinkhorn, Window
from .diagnose import Diagnosis, attention_matrix, diagnose
from .inputs import Inputs
from .promises import check
from .registry import build, entry, names, register, unregister

__all__ = [
    "Attention",
    "Content",
    "Cost",
    "Diagnosis",
    "Entry",
    "Inputs",
    "LOTConfig",
    "LocalConv",
    "Newton",
    "Pivots",
    "Prefix",
    "Sinkhorn",
    "Window",
    "attention_matrix",
    "build",
    "check",
    "diagnose",
    "entry",
    "names",
    "register",
    "unregister",
]
