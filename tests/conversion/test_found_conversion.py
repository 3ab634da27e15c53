"""Conversion without training: pivots are found in the sample, in every host."""

from __future__ import annotations

import copy

import pytest
import torch

import lotformer
from lotformer import conversion
from support.small_models import SMALL, output


@pytest.mark.parametrize("kind", SMALL)
def test_every_host_runs_is_saved_and_comes_back(kind: str, tmp_path) -> None:
    model, batch = SMALL[kind].build(), SMALL[kind].batch()
    before = output(model, batch)
    report = lotformer.convert(model, rank=4, pivots="found")
    assert len(report.converted) == SMALL[kind].converted
    assert report.options["pivots"] == "found"
    assert (report.options["balance"], report.options["eps"]) == ("none", 1.0)
    converted = output(model, batch)
    assert converted.isfinite().all()
    conversion.save(model, tmp_path / "model.safetensors")
    again = SMALL[kind].build()
    conversion.load(again, tmp_path / "model.safetensors")
    torch.testing.assert_close(output(again, batch), converted)
    lotformer.revert(model)
    torch.testing.assert_close(output(model, batch), before)


def test_more_pivots_are_nearer_to_softmax() -> None:
    model, batch = SMALL["bert"].build(), SMALL["bert"].batch()
    real = batch["attention_mask"].bool()
    before = output(model, batch)[real]
    errors = []
    for rank in (1, 4, 64):
        other = copy.deepcopy(model)
        lotformer.convert(other, rank=rank, pivots="found", window=None)
        errors.append(float((output(other, batch)[real] - before).norm()))
    assert errors[0] > errors[1] > 100 * errors[2]


def test_calibration_only_improves() -> None:
    model, batch = SMALL["bert"].build(), SMALL["bert"].batch()
    lotformer.convert(model, rank=2, pivots="found", window=None)
    report = lotformer.calibrate(model, [batch] * 4, steps=20)
    assert report.losses[-1] <= report.losses[0]


@pytest.mark.parametrize("asked", [{"balance": "both", "solver": "newton"}, {"key_masses": "uniform"}])
def test_strictly_doubly_stochastic_is_asked_for(asked: dict[str, str]) -> None:
    model, batch = SMALL["bert"].build(), SMALL["bert"].batch()
    report = lotformer.convert(model, rank=4, pivots="found", **asked)
    assert report.options["window"] is None
    quality = conversion.coupling_quality(model, [batch])
    assert quality.doubly_stochastic_max < 1e-3


def test_what_found_pivots_cannot_use_is_refused() -> None:
    with pytest.raises(ValueError, match=r"eps=0\.2 has no meaning for pivots=\"found\""):
        lotformer.convert(SMALL["bert"].build(), pivots="found", eps=0.2)
