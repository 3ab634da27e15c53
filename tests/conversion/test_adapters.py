"""PEFT adapters train, store and reload what a conversion has added, beside LoRA on the projections."""

from __future__ import annotations

import peft
import pytest
import torch
import transformers

import lotformer
from lotformer.attention.lot import LOT
from lotformer.conversion.hosts.sites import mechanism_of
from support.small_models import SMALL, output

pytestmark = pytest.mark.small_windows

ADAPTERS = {
    "whole mechanisms": {"modules_to_save": ["mechanism"]},
    "a low rank on the pivots": {"target_parameters": ["mechanism.pivots.points.bias"]},
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapter_trains_stores_and_reloads_pivots(kind, tmp_path):
    base, batch = SMALL["bert"].build(), SMALL["bert"].batch()
    lotformer.convert(base, rank=5, pivot_init="unit")
    base.save_pretrained(tmp_path / "base")
    before = output(base, batch)

    config = peft.LoraConfig(r=2, target_modules=["query"], **ADAPTERS[kind])
    model = peft.get_peft_model(base, config)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and ".mechanism." in name}
    assert trained
    optimizer, target = torch.optim.Adam(trained.values(), lr=0.1), torch.randn_like(before)
    for _ in range(2):  # the first step moves LoRA's B, which starts at zero; the second one A
        optimizer.zero_grad()
        (model(**batch).last_hidden_state - target).square().mean().backward()
        optimizer.step()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in trained.values())
    expected = output(model.eval(), batch)
    assert not torch.allclose(expected, before, atol=1e-5)
    model.save_pretrained(tmp_path / "adapter")

    plain = transformers.BertModel.from_pretrained(tmp_path / "base").eval()
    assert torch.equal(output(plain, batch), before)
    again = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    assert torch.equal(output(again, batch), expected)
    with again.disable_adapter():
        torch.testing.assert_close(output(again, batch), before)


def test_the_mechanism_in_use_is_found_inside_its_wrapper():
    base, batch = SMALL["bert"].build(), SMALL["bert"].batch()
    lotformer.convert(base, rank=5)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["query"], modules_to_save=["mechanism"]))
    layer = model.base_model.model.encoder.layer[0].attention.self
    assert isinstance(mechanism_of(layer), LOT)
    assert mechanism_of(layer) is layer.mechanism.modules_to_save["default"]
    with model.disable_adapter():
        assert mechanism_of(layer) is layer.mechanism.original_module
    report = lotformer.conversion.coupling_quality(base, [batch])
    assert report.residual_max < 1e-3
