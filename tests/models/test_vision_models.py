"""The registered vision models: what timm promises of its own, with any mechanism, size and set of special tokens."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys

import pytest

import lotformer.models  # first: it makes torchvision importable and registers the models

# isort: split
import timm
import torch
from timm.models.swin_transformer import SwinTransformerBlock
from timm.optim import create_optimizer_v2
from torch import Tensor, nn

from lotformer import attention
from lotformer.models.reduction import ReducedAttention
from lotformer.models.swin import WholeMapBlock
from lotformer.nn.feature_maps import TokenPositions

DEITS = [f"lot_deit_{size}{kind}_patch16_224" for size in ("tiny", "small", "base") for kind in ("", "_distilled")]
NAMES = sorted([*DEITS, "lot_vit_half", "lot_swin_tiny", "lot_pvt_tiny"])

SMALL_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
SMALL: dict[str, dict[str, object]] = {
    **dict.fromkeys(NAMES, SMALL_VIT),
    "lot_swin_tiny": {
        "img_size": 32, "window_size": 2, "embed_dim": 8, "depths": (1, 2, 2, 1), "num_heads": (1, 2, 2, 2),
    },
    "lot_pvt_tiny": {"img_size": 32, "embed_dims": (8, 16, 16, 24), "depths": (1, 1, 2, 1), "num_heads": (1, 2, 2, 3)},
}  # fmt: skip

NEEDS_OPTIONS: dict[str, dict[str, object]] = {
    "local": {"block_size": 4},
    "longformer": {"window": 4},
    "bigbird": {"block_size": 4, "random_blocks": 1},
    "reformer": {"chunk_size": 4},
    "informer": {},
}


def small(name: str, **kwargs: object) -> nn.Module:
    return timm.create_model(name, num_classes=5, **{**SMALL[name], **kwargs})


def images(height: int = 32, width: int = 32) -> Tensor:
    return torch.randn(2, 3, height, width)


def grids_read(model: nn.Module, pixels: Tensor) -> set[tuple[int, int]]:
    """The grids that mechanisms are called with."""
    seen: set[tuple[int, int]] = set()
    handles = [
        module.register_forward_pre_hook(lambda _, args, words: seen.add(words["grid"]), with_kwargs=True)
        for module in model.modules()
        if isinstance(module, attention.Attention)
    ]
    model(pixels)
    for handle in handles:
        handle.remove()
    return seen


def test_all_models_are_registered_and_only_their_package_imports_timm() -> None:
    code = (
        "import sys, lotformer; assert 'timm' not in sys.modules;"
        "import lotformer.models, timm; print(*timm.list_models('lot_*'))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == NAMES


@pytest.mark.parametrize("attention", ["lot", "softmax"])
@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_learns(name: str, attention: str) -> None:
    size = 64 if name == "lot_pvt_tiny" else 32  # a reduction to one key would leave its queries no gradient
    model = small(name, drop_path_rate=0.1, attention=attention, img_size=size).train()
    logits = model(images(size, size))
    assert logits.shape == (2, 5)
    logits.square().sum().backward()
    assert [key for key, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []


@pytest.mark.parametrize("name", NAMES)
def test_features_and_intermediates_keep_the_shape_of_the_image(name: str) -> None:
    size = {"img_size": (32, 64)}
    indices = [0, 1]
    features = timm.create_model(name, features_only=True, out_indices=indices, **{**SMALL[name], **size})
    maps = features(images(32, 64))
    if name == "lot_swin_tiny":
        maps = [x.permute(0, 3, 1, 2) for x in maps]
    reductions = features.feature_info.reduction()
    assert [tuple(x.shape[2:]) for x in maps] == [(32 // r, 64 // r) for r in reductions]
    model = small(name, **size).eval()
    final, intermediates = model.forward_intermediates(images(32, 64), indices=indices)
    assert [x.shape[1:] for x in intermediates] == [x.shape[1:] for x in maps]
    only = model.forward_intermediates(images(32, 64), indices=indices, stop_early=True, intermediates_only=True)
    assert len(only) == len(indices)
    assert final.isfinite().all()


@pytest.mark.parametrize("name", ["lot_vit_half", "lot_deit_tiny_distilled_patch16_224"])
def test_a_vit_takes_images_of_any_shape_at_run_time(name: str) -> None:
    model = small(name, dynamic_img_size=True).eval()
    for height, width in ((32, 32), (16, 40), (64, 24)):
        assert model(images(height, width)).shape == (2, 5)
        assert grids_read(model, images(height, width)) == {(height // 8, width // 8)}


def test_the_input_size_can_be_changed_after_construction() -> None:
    for name in ("lot_vit_half", "lot_swin_tiny"):
        model = small(name).eval()
        model.set_input_size(img_size=(64, 32))
        assert model(images(64, 32)).shape == (2, 5)
    assert small("lot_pvt_tiny").eval()(images(64, 96)).shape == (2, 5)


@pytest.mark.parametrize(
    ("name", "options", "special"),
    [
        ("lot_vit_half", {}, 1),
        ("lot_vit_half", {"reg_tokens": 3}, 4),
        ("lot_vit_half", {"class_token": False, "global_pool": "avg"}, 0),
        ("lot_deit_tiny_distilled_patch16_224", {}, 2),
    ],
)
@pytest.mark.parametrize("mechanism", ["lot", "polaformer"])
def test_special_tokens_stay_out_of_the_coupling(
    name: str, options: dict[str, object], special: int, mechanism: str
) -> None:
    model = small(name, attention=mechanism, **options)
    assert model.num_prefix_tokens == special
    assert all(getattr(block.attn.mechanism, "prefix_tokens", 0) == special for block in model.blocks)
    assert model(images()).shape == (2, 5)


@pytest.mark.parametrize("mechanism", ["flatten", "polaformer"])
@pytest.mark.parametrize("name", ["lot_vit_half", "lot_swin_tiny", "lot_pvt_tiny"])
def test_keys_get_positions_for_the_patches_of_their_stage(name: str, mechanism: str) -> None:
    model = small(name, attention=mechanism, img_size=(32, 64))
    found = [part for part in model.modules() if isinstance(part, TokenPositions)]
    grids = {"lot_vit_half": 2 * [(4, 8)], "lot_swin_tiny": [(8, 16), (4, 8), (4, 8)]}
    pyramid = [(8, 16), (4, 8), (2, 4), (2, 4), (1, 2)]
    assert [part.grid for part in found] == grids.get(name, pyramid)
    logits = model(images(32, 64))
    logits.square().sum().backward()
    assert found[0].table.grad.abs().sum() > 0  # of a last block, the class token alone is read


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lot_vit_half", {"dynamic_img_size": True}),
        ("lot_vit_half", {"dynamic_img_size": True, "attention_options": {"local_conv": False}}),
        ("lot_swin_tiny", {"strict_img_size": False, "window_size": 2}),
        ("lot_pvt_tiny", {}),
    ],
)
def test_positions_of_keys_fit_images_of_other_shapes(name: str, options: dict[str, object]) -> None:
    model = small(name, attention="polaformer", **options).eval()
    before = model(images(64, 32))
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, TokenPositions):
                part.table.normal_()
    for height, width in ((64, 32), (32, 96)):
        assert model(images(height, width)).isfinite().all()
    assert not torch.equal(model(images(64, 32)), before)


def test_positions_of_keys_count_special_tokens_that_are_coupled() -> None:
    options = {"local_conv": False}
    model = small("lot_vit_half", attention="flatten", attention_options=options, softmax_prefix=False)
    assert model.blocks[0].attn.mechanism.positions.table.shape[1] == 17
    assert model(images()).shape == (2, 5)
    none = small("lot_vit_half", attention="flatten", attention_options={"num_tokens": None})
    assert none.blocks[0].attn.mechanism.inner.positions is None


@pytest.mark.parametrize("name", ["lot_vit_half", "lot_swin_tiny", "lot_pvt_tiny"])
def test_the_authors_code_convolves_by_large_filters_that_heads_share(name: str) -> None:
    model = small(name, attention_options=lotformer.models.AUTHORS_CODE)
    layers = [part for part in model.modules() if isinstance(part, attention.entry("lot").build)]
    assert layers
    assert all(tuple(part.local.conv.weight.shape) == (part.head_dim, 1, 5, 5) for part in layers)
    assert all(part.config.solver.sweeps == 2 for part in layers)
    assert model(images()).isfinite().all()
    pickle.loads(pickle.dumps(model))


def test_a_configuration_is_taken_as_it_is() -> None:
    config = lotformer.LOTConfig(rank=4, prefix=attention.Prefix(1), window=attention.Window("2d", 3))
    model = small("lot_vit_half", attention_options={"config": config})
    assert all(block.attn.mechanism.config == config for block in model.blocks)
    assert model(images()).isfinite().all()


def test_without_a_softmax_prefix_every_token_is_coupled() -> None:
    model = small("lot_vit_half", softmax_prefix=False)
    q = torch.randn(2, 3, 17, 8)
    coupling = model.blocks[0].attn.mechanism.coupling(q, q)
    assert coupling.dense().shape[-2:] == (17, 17)


@pytest.mark.parametrize("mechanism", [name for name in attention.names() if not attention.entry(name).fixed_length])
def test_any_mechanism_by_name(mechanism: str) -> None:
    model = small("lot_vit_half", attention=mechanism, attention_options=NEEDS_OPTIONS.get(mechanism))
    logits = model(images())
    assert logits.shape == (2, 5)
    assert logits.isfinite().all()


def test_an_unknown_mechanism_is_named() -> None:
    with pytest.raises(ValueError, match="Did you mean 'polaformer'"):
        small("lot_vit_half", attention="polarformer")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("lot_vit_half", "deit_tiny_patch16_224"),
        ("lot_deit_tiny_distilled_patch16_224", "deit_tiny_distilled_patch16_224"),
    ],
)
def test_with_softmax_a_deit_is_timms(ours: str, theirs: str) -> None:
    reference = timm.create_model(theirs, num_classes=5, **SMALL[ours]).eval()
    model = small(ours, attention="softmax").eval()
    model.load_state_dict(reference.state_dict(), strict=True)
    x = images()
    torch.testing.assert_close(model(x), reference(x), rtol=1e-5, atol=1e-5)


def test_weights_of_timms_deit_load_around_the_new_attention() -> None:
    reference = timm.create_model("deit_tiny_patch16_224", num_classes=5, **SMALL_VIT)
    result = small("lot_vit_half").load_state_dict(reference.state_dict(), strict=False)
    assert result.unexpected_keys == []
    assert all(".attn.mechanism." in key for key in result.missing_keys)


def test_swin_mixes_whole_maps_first_and_windows_later() -> None:
    model = small("lot_swin_tiny")
    kinds = [{type(block) for block in stage.blocks} for stage in model.layers]
    assert kinds == [{WholeMapBlock}, {WholeMapBlock}, {SwinTransformerBlock}, {SwinTransformerBlock}]


def test_with_softmax_swin_is_timms() -> None:
    reference = timm.create_model("swin_tiny_patch4_window7_224", num_classes=5, **SMALL["lot_swin_tiny"]).eval()
    model = small("lot_swin_tiny", attention="softmax").eval()
    model.load_state_dict(reference.state_dict(), strict=True)
    x = images()
    torch.testing.assert_close(model(x), reference(x), rtol=0, atol=0)


def test_softmax_over_whole_maps_is_timms_swin_with_windows_as_large_as_the_map() -> None:
    sizes = {**SMALL["lot_swin_tiny"], "window_size": 8}
    reference = timm.create_model("swin_tiny_patch4_window7_224", num_classes=5, **sizes).eval()
    for key, parameter in reference.named_parameters():
        if "relative_position_bias_table" in key:
            nn.init.zeros_(parameter)  # softmax attention of the zoo knows no positions
    model = small("lot_swin_tiny", attention="softmax", window_size=8, map_stages=2).eval()
    result = model.load_state_dict(reference.state_dict(), strict=False)
    assert result.missing_keys == []
    assert all("relative_position_bias_table" in key for key in result.unexpected_keys)
    x = images()
    torch.testing.assert_close(model(x), reference(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ratios", [None, (1, 1, 1, 1), (4, 1, 2, 1)], ids=["original", "none", "others"])
@pytest.mark.parametrize("size", [32, 64])
def test_with_softmax_pvt_is_transformers_pvt(ratios: tuple[int, ...] | None, size: int) -> None:
    from transformers import PvtConfig, PvtForImageClassification

    widths, depths, heads = (8, 16, 16, 24), (1, 1, 2, 1), (1, 2, 2, 3)
    config = PvtConfig(
        image_size=size, hidden_sizes=widths, depths=depths, num_attention_heads=heads, num_labels=5,
        **({} if ratios is None else {"sequence_reduction_ratios": ratios}),
    )  # fmt: skip
    theirs = PvtForImageClassification(config).eval()
    ours = small("lot_pvt_tiny", attention="softmax", sr_ratios=ratios, img_size=size).eval()
    ours.load_state_dict(_from_transformers(theirs.state_dict(), depths), strict=True)
    x = images(size, size)
    torch.testing.assert_close(ours(x), theirs(x).logits, rtol=1e-5, atol=1e-5)


def test_pvt_reduces_a_map_that_is_not_square_by_rows_and_columns() -> None:
    layer = ReducedAttention(8, num_heads=2, ratio=2).eval()
    x = torch.randn(2, 24, 8)
    patches = x.view(2, 2, 2, 3, 2, 8).permute(0, 1, 3, 2, 4, 5).reshape(2, 6, 4, 8)  # 4 rows, 6 columns
    keys = layer.sr_norm(torch.einsum("bpsc,ocs->bpo", patches, layer.sr.weight.flatten(2)) + layer.sr.bias)
    q, _, _ = layer.qkv(x).chunk(3, -1)
    _, k, v = layer.qkv(keys).chunk(3, -1)
    heads = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in (q, k, v))
    mixed = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer(x, grid=(4, 6)), layer.proj(mixed), rtol=1e-5, atol=1e-6)


def test_reduction_of_the_keys_is_refused_where_it_cannot_be() -> None:
    with pytest.raises(ValueError, match="only softmax attention reduces its keys, not 'lot'"):
        small("lot_pvt_tiny", sr_ratios=(8, 4, 2, 1))
    with pytest.raises(ValueError, match="one for each of the 4 stages and end with 1"):
        small("lot_pvt_tiny", attention="softmax", sr_ratios=(8, 4, 2, 2))
    with pytest.raises(ValueError, match="4×4 tokens is smaller than the reduction ratio 8"):
        small("lot_pvt_tiny", attention="softmax", img_size=16)(images(16, 16))


def _from_transformers(state: dict[str, Tensor], depths: tuple[int, ...]) -> dict[str, Tensor]:
    parts = {
        "layer_norm_1": "norm1", "layer_norm_2": "norm2", "mlp.dense1": "mlp.fc1", "mlp.dense2": "mlp.fc2",
        "attention.output.dense": "attn.proj",
    }  # fmt: skip
    made: dict[str, Tensor] = {}
    for kind in ("weight", "bias"):
        made[f"norm.{kind}"] = state[f"pvt.encoder.layer_norm.{kind}"]
        made[f"head.{kind}"] = state[f"classifier.{kind}"]
    for stage, depth in enumerate(depths):
        theirs, ours = f"pvt.encoder.patch_embeddings.{stage}", f"stages.{stage}"
        made[f"{ours}.pos_embed"] = state[f"{theirs}.position_embeddings"]
        if f"{theirs}.cls_token" in state:
            made[f"{ours}.cls_token"] = state[f"{theirs}.cls_token"]
        for kind in ("weight", "bias"):
            made[f"{ours}.patch_embed.proj.{kind}"] = state[f"{theirs}.projection.{kind}"]
            made[f"{ours}.patch_embed.norm.{kind}"] = state[f"{theirs}.layer_norm.{kind}"]
            for index in range(depth):
                block, made_block = f"pvt.encoder.block.{stage}.{index}", f"{ours}.blocks.{index}"
                for old, new in parts.items():
                    made[f"{made_block}.{new}.{kind}"] = state[f"{block}.{old}.{kind}"]
                qkv = [state[f"{block}.attention.self.{part}.{kind}"] for part in ("query", "key", "value")]
                made[f"{made_block}.attn.qkv.{kind}"] = torch.cat(qkv)
                for old, new in {"sequence_reduction": "sr", "layer_norm": "sr_norm"}.items():
                    found = state.get(f"{block}.attention.self.{old}.{kind}")
                    if found is not None:
                        made[f"{made_block}.attn.{new}.{kind}"] = found
    return made


@pytest.mark.parametrize("name", ["lot_vit_half", "lot_swin_tiny", "lot_pvt_tiny"])
def test_pivots_and_masses_do_not_decay_in_timms_optimizer(name: str) -> None:
    model = small(name)
    optimizer = create_optimizer_v2(model, opt="adamw", weight_decay=0.05)
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] > 0 for p in group["params"]}
    names = {key for key, p in model.named_parameters() if id(p) in decayed}
    assert names
    assert not {key for key in names if ".pivots." in key or key.endswith(("pos_embed", "cls_token"))}


@pytest.mark.parametrize("name", ["lot_vit_half", "lot_swin_tiny", "lot_pvt_tiny"])
def test_models_copy_and_pickle(name: str) -> None:
    model = small(name).eval()
    x = images()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        torch.testing.assert_close(twin(x), model(x), rtol=0, atol=0)


def test_exports_are_what_the_package_lists() -> None:
    assert all(hasattr(lotformer.models, name) for name in lotformer.models.__all__)


@pytest.mark.parametrize("name", ["lot_pvt_tiny", "lot_swin_tiny"])
def test_checkpointed_maps_of_two_shapes_in_one_loss_have_the_gradients_of_plain_ones(name: str) -> None:
    model = small(name, **({"strict_img_size": False} if name == "lot_swin_tiny" else {})).eval()
    wide, high = images(32, 64), images(64, 32)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        (model(wide).square().mean() + model(high).square().mean()).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients()
    model.set_grad_checkpointing()
    for got, expected in zip(gradients(), plain, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
