"""Models of two halves: causal towers are left alone with the reason, the others are converted, and both still run."""

from __future__ import annotations

import pytest
import torch
import transformers

import lotformer
from lotformer.conversion import recipe
from lotformer.conversion.hosts.sites import converted

_SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20}
_TEXT = {
    **_SIZES,
    "vocab_size": 60,
    "max_position_embeddings": 40,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_IMAGE = {**_SIZES, "image_size": 20, "patch_size": 5}

TOWERS = {
    "CLIPModel": (transformers.CLIPConfig, _TEXT, "text_model"),
    "CLIPSegModel": (transformers.CLIPSegConfig, _TEXT, "text_model"),
    "AltCLIPModel": (transformers.AltCLIPConfig, {**_TEXT, "project_dim": 24}, None),
    "SiglipModel": (transformers.SiglipConfig, _TEXT, None),
    "ChineseCLIPModel": (transformers.ChineseCLIPConfig, _TEXT, None),
}


def build(kind: str):
    config, text, _ = TOWERS[kind]
    torch.manual_seed(0)
    return getattr(transformers, kind)(config(text_config=text, vision_config=_IMAGE)).eval()


@torch.no_grad()
def outputs(model) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 60, (2, 9), generator=generator)
    pixels = torch.randn(2, 3, 20, 20, generator=generator)
    return [x for x in model(input_ids=ids, pixel_values=pixels).to_tuple() if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("kind", TOWERS)
def test_causal_towers_are_skipped_and_the_model_runs(kind, tmp_path):
    model, causal = build(kind), TOWERS[kind][2]
    before = outputs(model)
    report = lotformer.convert(model, rank=5, pivot_init="unit")
    assert {"vision" in layer.name for layer in report.converted} == ({True} if causal else {True, False})
    skipped = [layer for layer in report.skipped if causal is not None and layer.name.startswith(causal)]
    assert all(layer.name.startswith(causal or "") and layer.reason for layer in report.skipped)
    assert bool(skipped) == (causal is not None)
    after = outputs(model)
    assert any(not torch.allclose(a, b, atol=1e-6) for a, b in zip(before, after, strict=True))

    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert [name for name, _ in converted(again)] == [layer.name for layer in report.converted]
    assert all(torch.equal(a, b) for a, b in zip(outputs(again), after, strict=True))
    lotformer.revert(model)
    assert all(torch.equal(a, b) for a, b in zip(outputs(model), before, strict=True))


def test_blip_does_not_dispatch_at_all():
    config = transformers.BlipConfig(text_config={**_TEXT, "encoder_hidden_size": 24}, vision_config=_IMAGE)
    with pytest.raises(ValueError, match=r"nothing to convert in BlipModel.*computes its own scores"):
        lotformer.convert(transformers.BlipModel(config))


def test_the_reason_is_given():
    report = lotformer.convert(build("CLIPModel"), rank=5)
    assert len(report.converted) == len(report.skipped) == 2
    assert all("it is causal" in layer.reason for layer in report.skipped)


def test_one_tower_loads_from_the_checkpoint_of_both(tmp_path):
    model = build("SiglipModel")
    lotformer.convert(model, rank=5)
    model.save_pretrained(tmp_path)
    pixels = torch.randn(2, 3, 20, 20)
    vision = transformers.SiglipVisionModel.from_pretrained(tmp_path).eval()
    assert len(converted(vision)) == 2
    with torch.no_grad():
        expected = model.vision_model(pixel_values=pixels).last_hidden_state
        assert torch.equal(vision(pixel_values=pixels).last_hidden_state, expected)


@pytest.mark.parametrize("kind", TOWERS)
def test_a_plain_checkpoint_loads_with_lot_attention_where_it_can(kind, tmp_path):
    original = build(kind)
    original.save_pretrained(tmp_path)
    model = type(original).from_pretrained(tmp_path, attn_implementation="lot").eval()
    report = lotformer.convert(original)
    assert [name for name, _ in converted(model)] == [layer.name for layer in report.converted]
    assert recipe(model) == recipe(original)
    assert all(x.isfinite().all() for x in outputs(model))
