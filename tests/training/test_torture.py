"""`kill -9` at random moments, then resume: the end is that of a run that nobody touched. CI kills three times."""

from __future__ import annotations

import pytest

from support.torture import torture


@pytest.mark.parametrize("spoiled", [0.0, 0.2], ids=["", "with losses that are NaN"])
def test_killed_three_times_a_run_ends_equal_bit_for_bit(spoiled, tmp_path):
    assert torture(kills=3, folder=tmp_path, workers=1, spoiled=spoiled) == ""
