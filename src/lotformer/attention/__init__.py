"""Attention mechanisms: one file each, one interface, one registry."""

from .base import Attention, Cost, Entry
from .registry import build, entry, names

__all__ = ["Attention", "Cost", "Entry", "build", "entry", "names"]
