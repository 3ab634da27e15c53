"""Calibration says what to expect of the whole model, and which layers had better stay softmax; it happens so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lotformer
from lotformer.conversion.calling import call
from lotformer.conversion.hosts.sites import converted
from lotformer.data.batches import main_tensor, pooled
from support.small_models import SMALL, output, torch_encoder

pytestmark = pytest.mark.small_windows


def _batches(count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 9, 24, generator=generator) for _ in range(count)]


def _vectors(model: nn.Module, batches: list[torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([pooled(main_tensor(call(model, batch)), batch) for batch in batches])


def _cosine(model: nn.Module, original: nn.Module, batches: list[torch.Tensor]) -> float:
    return float(torch.cosine_similarity(_vectors(model, batches), _vectors(original, batches)).mean())


def test_the_forecast_is_what_happens_on_other_inputs():
    original, model = torch_encoder().eval(), torch_encoder().eval()
    lotformer.convert(model, rank=2)
    report = lotformer.calibrate(model, _batches(20), steps=20, holdout=0.4)
    assert report.forecast is not None
    happened = _cosine(model, original, _batches(20, seed=1))
    assert report.forecast.cosine == pytest.approx(happened, abs=0.03)
    assert happened < 0.98
    assert "fine-tune" in str(report)


def test_keeping_a_layer_brings_what_was_forecast():
    original, model = torch_encoder().eval(), torch_encoder().eval()
    lotformer.convert(model, rank=2, pivots="fixed")
    report = lotformer.calibrate(model, _batches(10), steps=5)
    assert report.forecast is not None
    name = report.forecast.stubborn()[0]
    lotformer.revert(model, layers=[name])
    assert len(converted(model)) == 1
    happened = _cosine(model, original, _batches(4, seed=1))
    assert happened == pytest.approx(report.forecast.without[name], abs=0.03)
    assert happened > report.forecast.cosine


def test_a_good_conversion_is_called_ready():
    model = torch_encoder().eval()
    lotformer.convert(model, rank=2, window="1d", window_size=15)
    for name, parameter in model.named_parameters():
        if name.endswith("near.offset.bias"):
            nn.init.constant_(parameter, -50.0)  # the window is nearly everything
    assert "ready" in str(lotformer.calibrate(model, _batches(5), steps=1))


@pytest.mark.parametrize("kind", ["bert", "timm-vit", "torch-encoder"])
def test_a_part_goes_back_to_softmax_and_then_all(kind):
    small = SMALL[kind]
    model, batch = small.build(), small.batch()
    before = output(model, batch)
    lotformer.convert(model, rank=3)
    both = output(model, batch)
    names = [name for name, _ in converted(model)]
    lotformer.revert(model, layers=names[:1])
    part = output(model, batch)
    assert not torch.equal(part, both)
    assert not torch.equal(part, before)
    assert lotformer.conversion.recipe(model).layers == tuple(names[1:])
    lotformer.revert(model, layers=names[1:])
    assert torch.equal(output(model, batch), before)
    with pytest.raises(ValueError, match="nothing to revert"):
        lotformer.revert(model)


class TestLayersAuto:
    def test_the_layers_that_are_furthest_off_keep_softmax(self):
        model, batch = SMALL["bert"].build(), SMALL["bert"].batch()
        torch.manual_seed(0)
        report = lotformer.convert(model, rank=3, layers="auto", budget=1, probe=batch)
        assert (len(report.converted), len(report.skipped)) == (1, 1)
        lotformer.revert(model)
        torch.manual_seed(0)
        lotformer.convert(model, rank=3)
        errors = lotformer.calibrate(model, [batch], steps=1).error_before
        assert report.skipped[0].name == max(errors, key=errors.__getitem__)

    @pytest.mark.parametrize(
        ("given", "complaint"),
        [
            ({"layers": "auto"}, "belong together"),
            ({"budget": 1}, "belong together"),
            ({"layers": "auto", "budget": 1}, "give a batch"),
            ({"layers": "auto", "budget": 2, "probe": "batch"}, "must leave something"),
            ({"layers": "auto", "budget": -1, "probe": "batch"}, "0 or more"),
        ],
    )
    def test_what_makes_no_sense_is_refused_and_changes_nothing(self, given, complaint):
        model, batch = SMALL["bert"].build(), SMALL["bert"].batch()
        given = {**given, "probe": batch} if "probe" in given else given
        with pytest.raises(ValueError, match=complaint):
            lotformer.convert(model, rank=3, **given)
        assert not converted(model)
