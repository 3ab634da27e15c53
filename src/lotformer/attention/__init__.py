"""Attention mechanisms: one file each, one interface, one registry."""

from .base import Attention, Cost, Entry
from .diagnose import Diagnosis, attention_matrix, diagnose
from .promises import check
from .registry import build, entry, names, register, unregister

__all__ = [
    "Attention",
    "Cost",
    "Diagnosis",
    "Entry",
    "attention_matrix",
    "build",
    "check",
    "diagnose",
    "entry",
    "names",
    "register",
    "unregister",
]
