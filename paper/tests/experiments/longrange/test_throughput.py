"""Throughput: every length is measured once, and the table says how much faster."""

from __future__ import annotations

import pytest

from lotformer_paper.experiments import engine
from lotformer_paper.experiments.longrange import throughput
from lotformer_paper.experiments.longrange.throughput import Cell, ThroughputSettings


def test_lengths_are_measured_once_and_rendered(tmp_path):
    settings = ThroughputSettings(lengths=(32, 64), tokens=64, repeats=1, rank=4)
    cells = engine.run(throughput.EXPERIMENT, settings, tmp_path, command="lotformer experiment lra-throughput")
    assert [(cell.row, cell.length, cell.batch) for cell in cells] == [
        ("lot", 32, 2), ("softmax", 32, 2), ("lot", 64, 1), ("softmax", 64, 1),
    ]  # fmt: skip
    assert engine.run(throughput.EXPERIMENT, settings, tmp_path) == cells
    for cell in cells:
        assert sum(cell.parts.values()) == pytest.approx(1)
        assert cell.parts["attention"] > 0
        assert cell.parts["matrix products"] > 0
        assert cell.parts["optimizer"] > 0
    speeds, shares = engine.render(tmp_path).tables
    assert [row[0] for row in speeds.rows] == ["32", "64"]
    assert len(shares.rows) == 4


def test_tokens_per_second_are_of_processor_time():
    cell = Cell("lot", length=100, batch=4, seconds=4.0, processor_seconds=2.0, parts={})
    assert cell.tokens_per_second == 200


def test_an_unknown_mechanism_is_refused():
    with pytest.raises(ValueError, match="Did you mean 'softmax'"):
        ThroughputSettings(rows=("sofmax",))
