"""`kill -9` at random moments, then resume: the end is that of a run that nobody touched. CI kills three times."""

from __future__ import annotations

from lotformer.training.torture import torture


def test_killed_three_times_a_run_ends_equal_bit_for_bit(tmp_path):
    assert torture(kills=3, folder=tmp_path, workers=1) == ""
