"""Weight decay leaves pivots, masses and ε alone, in optimisers that other libraries build without being told."""

from __future__ import annotations

import importlib

import pytest
import torch

import lotformer
from support.small_models import SMALL, timm, transformers  # timm is imported there with care for torchvision

optim = importlib.import_module("timm.optim")

EVERYTHING = {
    "window": "1d",
    "learn_eps": True,
    "key_masses": "query-aware",
    "pivots": "input-aware",
    "local_conv": "1d",
}
SPARED = {
    "pivots.points.bias",
    "pivots.logits.bias",
    "log_eps.bias",
    "key_masses.direction.bias",
    "key_masses.query_weight.bias",
    "pooling.directions.bias",
    "pooling.pull.bias",
    "near.direction.bias",
    "near.mean_weight.bias",
    "near.offset.bias",
}


def hand_built():
    return timm.models.vision_transformer.VisionTransformer(
        img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=3,
        attn_layer=lotformer.LOTAttention.with_options(rank=4, **EVERYTHING),
    )  # fmt: skip


def converted(kind):
    model = SMALL[kind].build()
    lotformer.convert(model, rank=4, **EVERYTHING)
    return model


def assert_spared(model, optimizer):
    """All of the above, in both layers, do not decay; the weights of convolutions and projections do."""
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    spared = [name for name, p in model.named_parameters() if decay[id(p)] == 0]
    assert {name.split(".mechanism.")[1] for name in spared if ".mechanism." in name} == SPARED
    assert sum(".mechanism." in name for name in spared) == 2 * len(SPARED)
    assert all(
        decay[id(p)] == 0.05 for name, p in model.named_parameters() if name.endswith(("conv.weight", "proj.weight"))
    )


@pytest.mark.parametrize("build", [hand_built, lambda: converted("timm-vit")], ids=["hand-built", "converted"])
def test_in_timms_optimisers(build):
    model = build()
    assert_spared(model, optim.create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05))


@pytest.mark.parametrize("build", [hand_built, lambda: converted("timm-vit")], ids=["hand-built", "converted"])
def test_in_layer_wise_groups_which_are_told(build):
    model = build()
    groups = optim.param_groups_layer_decay(
        model, weight_decay=0.05, no_weight_decay_list=lotformer.no_weight_decay(model)
    )
    assert_spared(model, torch.optim.AdamW(groups))


@pytest.mark.parametrize("kind", ["bert-classifier", "vit"])
def test_in_the_trainer_of_hugging_face(kind, tmp_path):
    model = converted(kind)
    settings = transformers.TrainingArguments(str(tmp_path), weight_decay=0.05, report_to=[], use_cpu=True)
    assert_spared(model, transformers.Trainer(model, settings).create_optimizer())


def test_names_what_must_not_decay_with_what_the_model_names_itself():
    names = lotformer.no_weight_decay(hand_built())
    assert {"pos_embed", "cls_token"} < names
    assert {f"blocks.1.attn.mechanism.{name}" for name in SPARED} < names
    assert lotformer.no_weight_decay(torch.nn.Linear(2, 2)) == set()
    fixed = lotformer.LOTAttention(16, 2, learn_masses=False)
    assert lotformer.no_weight_decay(fixed) == {"mechanism.pivots.points.bias"}


def test_adapters_of_peft_reach_the_pivots():
    peft = pytest.importorskip("peft", reason="adapters need peft")
    model = lotformer.LOTAttention(16, 2, rank=4)
    x = torch.randn(2, 9, 16)
    before = model(x)
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=[], target_parameters=["mechanism.pivots.points.bias"])
    )
    torch.testing.assert_close(wrapped(x), before)  # an adapter starts at zero
    trained = {name: p for name, p in wrapped.named_parameters() if p.requires_grad}
    assert len(trained) == 2
    with torch.no_grad():
        for parameter in trained.values():
            parameter.normal_()
    out = wrapped(x)
    assert not torch.allclose(out, before)
    out.square().sum().backward()
    assert all(p.grad.abs().max() > 0 for p in trained.values())
