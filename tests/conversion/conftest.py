"""Texts of a few tokens for small models, with a window that leaves something of them to be transported."""

from __future__ import annotations

import pytest

from lotformer.conversion import api


@pytest.fixture(autouse=True)
def narrow_window(monkeypatch):
    """Tokens that see the whole text are read by softmax: there would be nothing to learn and nothing to go wrong."""
    monkeypatch.setitem(api.WINDOW_SIZES, "text", 5)
