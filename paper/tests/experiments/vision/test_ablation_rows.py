"""Every row of the ablations is a model that runs and learns, with the options that its name says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import lotformer.models  # noqa: F401  makes torchvision importable

# isort: split
from lotformer.attention.lot import LOT
from lotformer.conversion.measuring.couplings import couplings_watched
from lotformer.vision.build import build
from lotformer_paper.experiments.vision import ablation, ladder, rank, sinkhorn

ROWS = {
    f"{module.EXPERIMENT.name}/{name}": row for module in (ladder, rank, sinkhorn) for name, row in module.ROWS.items()
}
SMALL = ablation.AblationSettings(depth=1, image_size=16, rank=4)


def model(row: ablation.Row) -> torch.nn.Module:
    return build(dataclasses.replace(ablation._vision(SMALL, row, 0, Path()), num_classes=3))


@pytest.mark.parametrize("name", ROWS)
def test_every_row_runs_forward_and_backward(name: str) -> None:
    vit = model(ROWS[name])
    loss = vit(torch.randn(2, 3, 16, 16)).square().sum()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in vit.parameters())
    assert all(name in ladder.TITLES for name in ladder.ROWS)


@pytest.mark.parametrize(("name", "balance"), [("keys", "keys"), ("none", "none"), ("newton", "both")])
def test_the_last_rows_of_the_ladder_differ_in_what_is_balanced(name: str, balance: str) -> None:
    vit = model(ladder.ROWS[f"lot-cls-pola-dwc-{name}"]).eval()
    [lot] = [module for module in vit.modules() if isinstance(module, LOT)]
    assert lot.config.balance == balance
    with torch.no_grad(), couplings_watched(vit) as residuals:
        vit(10 * torch.randn(2, 3, 16, 16))
    [error] = residuals.values()
    assert (error > 1e-2) == (balance == "none")
