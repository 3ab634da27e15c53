"""Models of one architecture, converted and not, take turns at every size."""

from __future__ import annotations

from lotformer_paper.experiments import engine
from lotformer_paper.experiments.survival import speed


def test_every_size_is_timed_once(checkpoint, tmp_path):
    settings = speed.SpeedSettings(model="vit_tiny_patch16_224", sizes=(32, 64), rank=3, repeats=1)
    cells = engine.run(speed.EXPERIMENT, settings, tmp_path / "out")
    assert [(cell.size, cell.tokens) for cell in cells] == [(32, 5), (64, 17)]
    assert set(cells[0].seconds) == {"softmax", *speed.VARIANTS}
    assert engine.run(speed.EXPERIMENT, settings, tmp_path / "out") == cells
    page = engine.render(tmp_path / "out").markdown()
    assert "64 px, 17 tokens" in page
