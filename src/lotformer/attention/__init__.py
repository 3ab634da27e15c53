"""Attention mechanisms: one file each, one interface, one registry."""

from .base import Attention, Cost, Entry
from .diagnose import Diagnosis, attention_matrix, diagnose
from .registry import build, entry, names

__all__ = ["Attention", "Cost", "Diagnosis", "Entry", "attention_matrix", "build", "diagnose", "entry", "names"]
