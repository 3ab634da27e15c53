"""The inference form of a model: the same outputs, fewer weights, saved and loaded, refused where it cannot be."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

import lotformer
from lotformer import conversion
from lotformer.attention.folded import FoldedLOT
from lotformer.conversion.hosts.sites import converted
from support.small_models import SMALL, output, torch_encoder

PLAIN = {"rank": 3, "key_masses": "uniform", "pivots": "fixed", "window": None}
ROTARY = ("modernbert", "timm-eva", "timm-rope")
LINEAR = [name for name in SMALL if name not in ROTARY]


def trained(model: nn.Module) -> nn.Module:
    """Mechanisms whose parameters no initialiser would produce, and biases that count."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".mechanism." in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("kind", LINEAR)
def test_outputs_stay_and_the_weights_of_queries_and_keys_go(kind):
    model, batch = SMALL[kind].build(), SMALL[kind].batch()
    lotformer.convert(model, **PLAIN)
    before, parameters = output(trained(model), batch), size(model)
    report = lotformer.fold(model)
    assert len(report.layers) == SMALL[kind].converted
    torch.testing.assert_close(output(model, batch), before, rtol=1e-3, atol=1e-4)
    assert (report.parameters_before, report.parameters_after) == (parameters, size(model))
    assert size(model) < parameters
    assert "folded 2 attention layers" in str(report)


@pytest.mark.parametrize(
    "options",
    [
        {"key_masses": "linear"},
        {"key_masses": "query-aware"},
        {"prefix_tokens": 1},
        {"prefix_tokens": 1, "polarize_prefix": True},
        {"balance": "keys", "scale": 0.4},
    ],
    ids=["linear masses", "query-aware masses", "prefix", "polarised prefix", "keys"],
)
@pytest.mark.parametrize("kind", ["bert", "torch-encoder"])
def test_every_option_of_fixed_pivots_folds(kind, options, tmp_path):
    model, batch = SMALL[kind].build(), SMALL[kind].batch()
    lotformer.convert(model, **{**PLAIN, **options})
    before = output(trained(model), batch)
    plan = conversion.coupling_quality(model, [batch])
    lotformer.fold(model)
    torch.testing.assert_close(output(model, batch), before, rtol=1e-3, atol=1e-4)
    folded = conversion.coupling_quality(model, [batch])
    assert folded.doubly_stochastic_max == pytest.approx(plan.doubly_stochastic_max, rel=1e-2, abs=1e-3)
    if kind == "bert":
        model.save_pretrained(tmp_path)
        again = type(model).from_pretrained(tmp_path).eval()
        torch.testing.assert_close(output(again, batch), output(model, batch), rtol=1e-5, atol=1e-5)
        assert size(again) == size(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["bert", "torch-encoder", "layer"])
@pytest.mark.parametrize(
    "options",
    [
        {"key_masses": "linear"},
        {"key_masses": "query-aware"},
        {"prefix_tokens": 1},
        {"prefix_tokens": 1, "polarize_prefix": True},
    ],
    ids=["linear masses", "query-aware masses", "prefix", "polarised prefix"],
)
def test_what_is_folded_runs_in_half_precision(dtype, kind, options):
    if kind == "layer":
        model, batch = lotformer.LOTAttention(24, 3, rank=5, **options).eval(), torch.randn(2, 30, 24)
    else:
        model, batch = SMALL[kind].build(), SMALL[kind].batch()
        lotformer.convert(model, **{**PLAIN, **options})
    expected = output(model, batch)
    lotformer.fold(model)
    model.to(dtype)
    half = batch.to(dtype) if isinstance(batch, torch.Tensor) and batch.is_floating_point() else batch
    assert (output(model, half).float() - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize("kind", ["timm-vit", "torch-encoder"])
def test_a_file_keeps_the_form(kind, tmp_path):
    model, batch = SMALL[kind].build(), SMALL[kind].batch()
    lotformer.convert(model, **PLAIN)
    lotformer.fold(trained(model))
    conversion.save(model, tmp_path / "model.safetensors")
    again = SMALL[kind].build()
    conversion.load(again, tmp_path / "model.safetensors")
    assert torch.equal(output(again, batch), output(model, batch))
    assert all(isinstance(module.mechanism, FoldedLOT) for _, module in converted(again))


def test_a_file_that_does_not_fit_leaves_the_model_as_it_is(tmp_path):
    model, other = SMALL["torch-encoder"].build(), torch_encoder()
    lotformer.convert(model, **PLAIN)
    lotformer.fold(model)
    conversion.save(model, tmp_path / "model.safetensors")
    other.layers[0].linear1 = nn.Linear(24, 7)
    weights = {name: x.clone() for name, x in other.state_dict().items()}
    with pytest.raises(ValueError, match="does not fit"):
        conversion.load(other, tmp_path / "model.safetensors")
    assert weights.keys() == other.state_dict().keys()
    assert all(torch.equal(x, other.state_dict()[name]) for name, x in weights.items())


def test_the_body_of_a_saved_classifier_loads_folded(tmp_path):
    model, batch = SMALL["bert-classifier"].build(), SMALL["bert-classifier"].batch()
    lotformer.convert(model, **PLAIN)
    lotformer.fold(trained(model))
    model.save_pretrained(tmp_path)
    body = type(model.bert).from_pretrained(tmp_path, add_pooling_layer=True).eval()
    assert torch.equal(output(body, batch), output(model.bert, batch))


def test_models_with_layers_of_ours_fold_and_load_after_folding():
    def build() -> nn.Module:
        slot = lotformer.LOTAttention.with_options(rank=3, prefix_tokens=1, polarize_prefix=True)
        return timm.models.vision_transformer.VisionTransformer(
            img_size=20, patch_size=5, embed_dim=24, num_heads=3, depth=2, num_classes=5, attn_layer=slot
        ).eval()

    model, image = trained(build()), torch.randn(2, 3, 20, 20)
    before = output(model, image)
    report = lotformer.fold(model, probe=image)
    assert report.layers == ("blocks.0.attn", "blocks.1.attn")
    torch.testing.assert_close(output(model, image), before, rtol=1e-3, atol=1e-4)
    again = build()
    lotformer.fold(again)
    again.load_state_dict(model.state_dict())
    assert torch.equal(output(again, image), output(model, image))
    with pytest.raises(ValueError, match="is folded already"):
        lotformer.fold(model)


def test_the_folded_layer_exports():
    layer = lotformer.LOTAttention(16, 2, rank=3, iters=2, key_masses="query-aware").eval()
    layer.fold()
    length = torch.export.Dim("length", min=4, max=512)
    program = torch.export.export(layer, (torch.randn(2, 17, 16),), dynamic_shapes=({1: length},))
    x = torch.randn(2, 31, 16)
    torch.testing.assert_close(program.module()(x), layer(x), rtol=1e-4, atol=1e-5)


def test_under_autocast_the_scores_are_not_rounded():
    layer = lotformer.LOTAttention(16, 2, rank=3, eps=0.1).eval()
    x = torch.randn(2, 17, 16)
    layer.fold()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    torch.testing.assert_close(out.float(), layer(x), rtol=0.05, atol=0.02)


REFUSED = {
    "bert": ({"pivots": "input-aware"}, "pooled from the keys"),
    "vit": ({"window": "2d", "prefix_tokens": 1}, "a window compares queries with keys"),
    "modernbert": ({}, "apply_rotary_pos_emb comes between"),
    "timm-rope": ({}, "turned by their positions"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_folded_stays_as_it_is(kind):
    options, reason = REFUSED[kind]
    model, batch = SMALL[kind].build(), SMALL[kind].batch()
    lotformer.convert(model, **{**PLAIN, **options})
    before = output(model, batch)
    with pytest.raises(ValueError, match=reason):
        lotformer.fold(model)
    assert torch.equal(output(model, batch), before)


def test_other_reasons_to_refuse():
    model = SMALL["bert"].build()
    with pytest.raises(ValueError, match="holds no LOT attention"):
        lotformer.fold(model)
    lotformer.convert(model, "hydra")
    with pytest.raises(ValueError, match="holds no LOT attention"):
        lotformer.fold(model)
    half = SMALL["bert"].build().bfloat16()
    lotformer.convert(half, **PLAIN)
    with pytest.raises(ValueError, match=r"too coarse: use .float\(\)"):
        lotformer.fold(half)
    normalised = lotformer.LOTAttention(16, 2, rank=3, qk_norm=True, norm_layer=nn.LayerNorm)
    with pytest.raises(ValueError, match="normalised"):
        lotformer.fold(normalised)


def test_something_between_projections_and_scores_shows_on_the_probe():
    model, batch = SMALL["timm-vit"].build(), SMALL["timm-vit"].batch()
    lotformer.convert(model, **PLAIN)
    model.blocks[1].attn.qkv.register_forward_hook(lambda _, given, out: out + out.roll(1, -1))
    before = output(model, batch)
    with pytest.raises(ValueError, match="would change what"):
        lotformer.fold(model)
    assert torch.equal(output(model, batch), before)


def test_a_folded_model_does_not_learn_and_does_not_go_back():
    model, batch = SMALL["bert"].build(), SMALL["bert"].batch()
    lotformer.convert(model, **PLAIN)
    lotformer.fold(model)
    for refused in (
        lotformer.revert,
        lambda m: lotformer.calibrate(m, [batch]),
        lambda m: lotformer.finetune(m, [batch]),
    ):
        with pytest.raises(ValueError, match="folded for inference"):
            refused(model)
