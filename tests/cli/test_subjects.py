"""What `lotformer convert` reads before it learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lotformer.cli.subjects import _image_batches


@pytest.mark.parametrize("steps", [0, 1, 20])
def test_no_more_images_are_opened_than_steps_can_use(steps, tmp_path):
    for number in range(1000):
        (tmp_path / f"{number:03}.png").touch()
    opened: list[int] = []

    def read(file: Path) -> torch.Tensor:
        opened.append(int(file.stem))
        return torch.zeros(3, 4, 4)

    batches = _image_batches(tmp_path, read, steps)
    assert len(batches) == {0: 0, 1: 10, 20: 25}[steps]
    assert len(set(opened)) == len(opened) == 8 * len(batches)
    if steps:
        assert opened[0] < 100
        assert opened[-1] > 900, "they are spread over the folder"
