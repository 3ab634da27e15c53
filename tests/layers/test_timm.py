"""The layer inside real timm blocks and vision transformers: built, called, saved and optimised as timm does it."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle

import pytest
import torch
from torch import nn

import lotformer
from lotformer import AttentionLayer, LOTAttention, attention
from support.problems import lengths_mask
from support.small_models import timm  # imported there with care for torchvision

Block = timm.models.vision_transformer.Block
VisionTransformer = timm.models.vision_transformer.VisionTransformer
TimmAttention = timm.layers.Attention

LOT = LOTAttention.with_options(rank=8, prefix_tokens=1)
TIMM_WORDS = set(inspect.signature(TimmAttention).parameters) - {"attn_head_dim", "dim_out", "gated"}


def vit(attn_layer, **options):
    settings = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
    return VisionTransformer(**settings | options, attn_layer=attn_layer)


def images(dtype=torch.float32, size=(16, 16)):
    return torch.randn(2, 3, *size, dtype=dtype)


def whole(mechanism, **options):
    """A vision transformer of any mechanism: on the patches alone where it needs a grid."""
    entry = attention.entry(mechanism)
    settings = {"max_length": 17} if "max_length" in inspect.signature(entry.build).parameters else {}
    layer = AttentionLayer.with_options(mechanism=mechanism, **settings)
    return vit(
        layer, depth=1, class_token=not entry.needs_grid, global_pool="avg" if entry.needs_grid else "token", **options
    )


@pytest.mark.parametrize("layer", [AttentionLayer, LOTAttention])
def test_the_constructor_knows_every_word_with_which_timm_builds_attention(layer):
    assert set(inspect.signature(layer).parameters) >= TIMM_WORDS
    forward = inspect.signature(layer.forward).parameters
    assert list(forward)[:4] == list(inspect.signature(TimmAttention.forward).parameters)


@pytest.mark.parametrize("mechanism", attention.names())
def test_every_mechanism_serves_a_whole_vision_transformer(mechanism):
    model = whole(mechanism)
    out = model(images())
    assert out.shape == (2, 3)
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("mechanism", attention.names())
def test_every_mechanism_takes_device_and_dtype(mechanism):
    model = whole(mechanism, device="meta")
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])
    model = whole(mechanism, dtype=torch.float64)
    assert all(p.dtype == torch.float64 for p in model.parameters())
    assert model(images(torch.float64)).dtype == torch.float64


@pytest.mark.parametrize(
    "options", [{}, {"qk_norm": True, "scale_attn_norm": True, "qkv_bias": True}], ids=["plain", "norms"]
)
def test_with_softmax_the_layer_is_timms_own_with_its_state(options):
    ours = Block(16, 2, attn_layer=AttentionLayer, **options).eval()
    theirs = Block(16, 2, attn_layer=TimmAttention, **options).eval()
    ours.load_state_dict(theirs.state_dict())  # strict: the same names
    x = torch.randn(2, 9, 16)
    torch.testing.assert_close(ours(x), theirs(x))
    real = lengths_mask([9, 6], 9)
    mask = real[:, None, None, :]
    torch.testing.assert_close(ours(x, attn_mask=mask)[real], theirs(x, attn_mask=mask)[real])


def test_a_trained_vits_state_carries_over_and_only_the_mechanisms_are_missing():
    theirs, ours = vit(TimmAttention), vit(LOT)
    missing, unexpected = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert not unexpected
    assert missing
    assert all(".attn.mechanism." in name for name in missing)


def test_a_hand_built_vit_and_a_converted_one_share_their_state():
    hand_built, converted = (
        vit(LOTAttention.with_options(rank=8, pivot_init="small", solver="newton")).eval(),
        vit("attn"),
    )
    lotformer.convert(converted, rank=8, eps=1.0, key_masses="uniform", pivots="fixed", tol=1e-6)
    converted.load_state_dict(hand_built.state_dict())
    torch.testing.assert_close(converted.eval()(images := torch.randn(2, 3, 16, 16)), hand_built(images))


FORMS = {
    "(B, 1, 1, N)": lambda real: real[:, None, None, :],
    "(B, 1, N, N)": lambda real: (real[:, None, :] & real[:, :, None])[:, None],
    "(B, H, N, N)": lambda real: real[:, None, None, :].expand(-1, 2, 9, -1).clone(),
    "additive": lambda real: torch.zeros(2, 1, 1, 9).masked_fill(~real[:, None, None], -torch.inf),
}


@pytest.mark.parametrize("form", FORMS)
def test_padding_masks_of_timms_shapes_equal_truncation(form):
    block = Block(16, 2, attn_layer=LOT).eval()
    x, real = torch.randn(2, 9, 16), lengths_mask([9, 6], 9)
    out = block(x, attn_mask=FORMS[form](real))
    torch.testing.assert_close(out[1:, :6], block(x[1:, :6]))
    torch.testing.assert_close(out[:1], block(x[:1]))
    torch.testing.assert_close(block.attn(x, mask=real), block.attn(x, attn_mask=FORMS[form](real)))


def test_a_square_mask_is_a_mask_of_pairs_even_when_there_are_as_many_samples_as_tokens():
    layer, x = LOTAttention(16, 2, rank=4), torch.randn(5, 5, 16)
    first_three = (torch.arange(5) < 3).expand(5, 5)
    torch.testing.assert_close(layer(x, first_three), layer(x, mask=first_three))
    with pytest.raises(ValueError, match="not a pure padding mask: tokens of one sequence see different sets"):
        layer(x, lengths_mask([5, 4, 3, 2, 1], 5))


def test_masks_that_are_not_padding_are_refused_with_the_reason():
    block, x = Block(16, 2, attn_layer=LOT), torch.randn(2, 9, 16)
    window = (torch.arange(9)[:, None] - torch.arange(9)).abs() < 3
    by_head = torch.ones(1, 2, 1, 9, dtype=torch.bool)
    by_head[:, 1, :, 5:] = False
    for mask, why in (
        (window, "tokens of one sequence see different sets of keys"),
        (torch.ones(9, 9, dtype=torch.bool).tril(), "tokens of one sequence see different sets of keys"),
        (by_head, "heads see different sets of keys"),
        (torch.randn(1, 2, 9, 9), "adds finite numbers to the scores"),
        (
            torch.ones(2, 9, dtype=torch.bool),
            r"broadcasts to .* got \(2, 9\)\. Pass a \(2, 9\) mask of real tokens as `mask`",
        ),
        (torch.ones(2, 3, 9, 9, dtype=torch.bool), r"broadcasts to .*\(2, 2, 9, 9\)"),
        (torch.ones(9, 9, dtype=torch.long), "boolean or an additive mask, got torch.int64"),
    ):
        with pytest.raises(ValueError, match=why):
            block(x, attn_mask=mask)
    with pytest.raises(ValueError, match="pass one of them"):
        block.attn(x, window, mask=lengths_mask([9, 6], 9))


def test_causal_calls_are_refused_with_the_reason():
    x = torch.randn(2, 9, 16)
    with pytest.raises(ValueError, match="by induction A is the identity"):
        Block(16, 2, attn_layer=LOT)(x, is_causal=True)
    with pytest.raises(ValueError, match="looks both ways"):
        Block(16, 2, attn_layer=AttentionLayer)(x, is_causal=True)


def test_dropout_reaches_the_mechanism_or_is_refused():
    assert vit(LOT, attn_drop_rate=0.2).blocks[1].attn.mechanism.config.dropout == 0.2
    with pytest.raises(ValueError, match=r"attn_drop=0\.2: 'performer' has no dropout"):
        vit(AttentionLayer.with_options(mechanism="performer"), attn_drop_rate=0.2)


def test_norms_without_a_norm_layer_are_refused():
    for words in ({"qk_norm": True}, {"scale_norm": True}):
        with pytest.raises(ValueError, match="need a norm_layer"):
            LOTAttention(16, 2, **words)


def test_options_filled_in_give_layers_of_the_original_class():
    model = vit(LOT)
    assert type(model.blocks[0].attn) is LOTAttention
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        x = images()
        torch.testing.assert_close(copied.eval()(x), model.eval()(x))
    assert LOT.with_options(eps=0.5)(16, rank=4).mechanism.pivots.points.bias.shape == (
        8,
        4,
        2,
    )  # the caller's rank wins
    by_hand = functools.partial(LOTAttention, rank=8)(16, num_heads=2)
    assert by_hand.mechanism.pivots.points.bias.shape == (2, 8, 8)


def test_a_meta_model_is_reset_as_if_built_in_place():
    layer = LOTAttention.with_options(rank=4, prefix_tokens=1, eps=0.3, learn_eps=True, key_masses="query-aware")
    model = vit(layer, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    model.init_weights()
    assert all(p.isfinite().all() for p in model.parameters())
    torch.testing.assert_close(model.blocks[0].attn.mechanism.eps, torch.full((2,), 0.3))
    assert model(images()).isfinite().all()


def test_a_whole_vision_transformer_compiles_without_a_break():
    model = vit(LOT).eval()
    x = images()
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))


def test_an_image_that_is_not_square_takes_its_grid_from_the_constructor_or_the_call():
    layer = LOTAttention.with_options(rank=4, prefix_tokens=1, local_conv="2d", grid_size=(2, 6))
    model = vit(layer, img_size=(8, 24)).eval()
    assert model.patch_embed.grid_size == (2, 6)
    out = model(images(size=(8, 24)))
    attn = model.blocks[0].attn
    x = torch.randn(2, 13, 16)
    torch.testing.assert_close(attn(x), attn(x, grid=(2, 6)))
    assert not torch.allclose(attn(x), attn(x, grid=(6, 2)))
    assert out.shape == (2, 3)
    with pytest.raises(ValueError, match="12 tokens do not form a square"):
        vit(LOTAttention.with_options(prefix_tokens=1, local_conv="2d"), img_size=(8, 24))(images(size=(8, 24)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_query_and_key_norms_work_under_autocast(dtype):
    block = Block(16, 2, attn_layer=LOT, qk_norm=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = block(torch.randn(2, 9, 16, dtype=dtype))
    out.float().square().sum().backward()
    assert block.attn.q_norm.weight.grad.isfinite().all()


def test_every_option_is_taught_where_a_user_looks():
    parameters = inspect.signature(LOTAttention).parameters
    options = inspect.signature(lotformer.attention.entry("lot").build).parameters.keys() - {
        "head_dim",
        "num_heads",
        "dropout",
    }
    assert options < parameters.keys()
    assert all(f"        {name}: " in LOTAttention.__doc__ for name in options)
    assert parameters["rank"].default == 32
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    with pytest.raises(TypeError, match=r"unexpected option 'rnak'\. Did you mean 'rank'"):
        LOTAttention(16, 2, rnak=4)


def test_the_layer_is_a_plain_module_too():
    layer = LOTAttention(16, 2, rank=4)
    assert isinstance(layer, nn.Module)
    assert {name for name, _ in layer.named_children()} == {
        "qkv", "q_norm", "k_norm", "mechanism", "norm", "proj", "proj_drop",
    }  # fmt: skip
