"""Models of two halves: causal towers are left alone with the reason, the others are converted, and both still run."""

from __future__ import annotations

import json
import re

import pytest
import torch
import transformers

import lotformer
from lotformer.conversion import recipe
from lotformer.conversion.hosts.sites import converted, mechanism_of
from lotformer.conversion.recipe import Recipe

pytestmark = pytest.mark.small_windows

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


def windows(model) -> dict[str, set[tuple[str | None, int]]]:
    """By tower, the windows of its layers and how many special tokens they read."""
    found: dict[str, set[tuple[str | None, int]]] = {}
    for name, module in converted(model):
        lot = mechanism_of(module)
        kind = None if lot.near is None else lot.near.kind
        found.setdefault("image" if "vision" in name else "text", set()).add((kind, lot.prefix_tokens))
    return found


@pytest.mark.parametrize(
    ("kind", "special", "causal"), [("SiglipModel", 0, False), ("AltCLIPModel", 1, False), ("CLIPModel", 1, True)]
)
def test_each_tower_reads_the_tokens_near_its_own(kind, special, causal, tmp_path):
    model = build(kind)
    report = lotformer.convert(model, rank=5)
    expected = {"image": {("2d", special)}} | ({} if causal else {"text": {("1d", 0)}})
    assert windows(model) == expected
    assert set(report.towers) == (set() if causal else {"text", "image"})
    assert causal or re.search("where image is read: .*window='2d'", str(report))
    model.save_pretrained(tmp_path)
    assert windows(type(model).from_pretrained(tmp_path)) == expected
    plain = build(kind)
    plain.save_pretrained(tmp_path / "plain")
    assert windows(type(plain).from_pretrained(tmp_path / "plain", attn_implementation="lot")) == expected


def test_what_is_asked_for_holds_in_both_towers():
    model = build("SiglipModel")
    report = lotformer.convert(model, rank=5, window=None, prefix_tokens=0)
    assert windows(model) == {"text": {(None, 0)}, "image": {(None, 0)}}
    assert report.towers == {}
    lotformer.revert(model)
    assert lotformer.convert(model, rank=5, window=None).towers == {}, "none of them has special tokens"
    assert windows(model) == {"text": {(None, 0)}, "image": {(None, 0)}}
    lotformer.revert(model)
    lotformer.convert(model, rank=5, window_size=3)
    assert {mechanism_of(module).near.size for _, module in converted(model)} == {3}


def test_both_towers_can_be_taught(tmp_path):
    model = build("SiglipModel")
    lotformer.convert(model, rank=5)
    batches = [{"input_ids": torch.randint(3, 60, (2, 9)), "pixel_values": torch.randn(2, 3, 20, 20)} for _ in range(3)]
    before = {name: p.clone() for name, p in model.named_parameters() if ".mechanism." in name}
    lotformer.calibrate(model, batches, steps=2, checkpoint=tmp_path / "run")
    moved = {
        name.partition(".")[0] for name, p in model.named_parameters() if name in before and (p != before[name]).any()
    }
    assert moved == {"text_model", "vision_model"}


@pytest.mark.parametrize(
    ("towers", "message"),
    [
        ("window", "tables of options"),
        ({"text": "1d"}, "tables of options"),
        ({"smell": {}}, "reads text or image or sound"),
        ({"text": {"window": {"kind": "3d"}}}, "window must be"),
        ({"image": {"windows": "2d"}}, "windows"),
    ],
)
def test_towers_from_strangers_are_checked(towers, message):
    model = build("SiglipModel")
    lotformer.convert(model, rank=5)
    written = recipe(model).to_dict()
    assert Recipe.from_dict(json.loads(json.dumps(written))) == recipe(model)
    with pytest.raises(ValueError, match=message):
        Recipe.from_dict({**written, "towers": towers})


def test_a_save_that_is_refused_changes_nothing(tmp_path):
    """Towers that were converted one by one differ in their windows, which one recipe cannot hold."""
    model = build("SiglipModel")
    lotformer.convert(model.text_model, rank=5)
    lotformer.convert(model.vision_model, rank=5)
    before = outputs(model)
    with pytest.raises(ValueError, match="different settings"):
        model.save_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(outputs(model), before, strict=True))


@pytest.mark.parametrize("kind", ["SiglipModel", "AltCLIPModel"])
def test_folded_towers_are_saved_and_loaded(kind, tmp_path):
    model = build(kind)
    lotformer.convert(model, rank=5, window=None, prefix_tokens=0, pivots="fixed")
    lotformer.fold(model)
    before = outputs(model)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert all(torch.equal(a, b) for a, b in zip(outputs(again), before, strict=True))


def test_a_tower_keeps_its_patches_to_itself():
    """Nothing says what reaches the attention beside it: no window is guessed."""

    class Images(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch_embed = torch.nn.Conv2d(3, 24, 5, 5)
            self.body = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(24, 3, 20, batch_first=True), 1)

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            return self.body(self.patch_embed(pixels).flatten(2).mT)

    texts = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(24, 3, 20, batch_first=True), 1)
    model = torch.nn.ModuleDict({"vision": Images(), "texts": texts})
    lotformer.convert(model, rank=5)
    assert windows(model) == {"image": {("2d", 0)}, "text": {(None, 0)}}
    assert model["texts"](torch.randn(2, 7, 24)).isfinite().all()
    assert model["vision"](torch.randn(2, 3, 20, 15)).isfinite().all()
