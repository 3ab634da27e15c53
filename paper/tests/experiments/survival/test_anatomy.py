"""What heads do, and what low rank makes of it: measured by definition on matrices that are known."""

from __future__ import annotations

import functools

import pytest
import torch

from lotformer_paper.experiments import engine
from lotformer_paper.experiments.survival import anatomy


def test_near_keys_are_the_prefix_and_a_window():
    near = anatomy.near_keys(1 + 12, 1, (3, 4), 3)
    assert near[0].all()
    assert near[:, 0].all()
    assert near[1 + 5, 1:].view(3, 4).tolist() == [[True, True, True, False]] * 3
    assert near[1, 1:].view(3, 4).sum() == 4


def test_what_is_near_costs_no_rank():
    """The identity has full rank, and nothing is left of it beside a window."""
    matrix, near = torch.eye(13)[None, None], anatomy.near_keys(13, 1, (3, 4), 1)
    torch.testing.assert_close(anatomy._truncated(matrix, 1, near), matrix)
    assert (anatomy._truncated(matrix, 6, None) - matrix).square().sum() == pytest.approx(7, abs=1e-4)


def test_a_model_is_looked_at_layer_by_layer(images, checkpoint, tmp_path):
    settings = anatomy.AnatomySettings(
        model="vit_tiny_patch16_224", size=64, classes=3, images=2, ranks=(2, 4, 17), window=3
    )
    run = functools.partial(engine.run, anatomy.EXPERIMENT, settings, checkpoint=checkpoint, pictures=images)
    [seen] = run(tmp_path / "out")
    assert len(seen.layers) == 2
    for layer in seen.layers:
        assert layer.error["2"] > layer.error["4"] > layer.error["17"]
        assert layer.error["17"] == pytest.approx(0, abs=1e-8)
        for head in layer.heads:
            assert 0 < head.itself + head.beside + head.special <= 1 + 1e-5
            assert head.column >= 1
    assert [(growth.rank, growth.near) for growth in seen.growth] == [(2, False), (2, True), (4, False), (4, True)]
    assert all(growth.hidden[0] == 0 for growth in seen.growth)  # nothing is wrong before the first layer
    assert run(tmp_path / "out") == [seen]
    files = engine.render(tmp_path / "out").write(tmp_path / "out")
    assert {file.name for file in files} >= {"table.md"}
