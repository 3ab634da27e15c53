"""Row and column sums are told of every model with our attention, converted or built with it, whatever is beside."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch

import lotformer
import lotformer.models
from lotformer.attention.lot import LOT
from lotformer.conversion import coupling_quality
from lotformer.conversion.measuring.couplings import couplings_watched
from support.small_models import SMALL, output

IMAGES = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(1))


def deit(**options: Any) -> torch.nn.Module:
    """timm's DeiT-Tiny with our attention, as deep as a test needs it."""
    return timm.create_model("lot_deit_tiny_patch16_224", depth=1, num_classes=3, **options).eval()


class TestModelsBuiltWithOurLayers:
    def test_a_timm_model_with_a_prefix_and_a_convolution(self):
        model = deit()
        mechanism = model.blocks[0].attn.mechanism
        assert mechanism.prefix_tokens == 1
        assert mechanism.local is not None
        quality = coupling_quality(model, [IMAGES])
        plain = deit(attention_options={"local_conv": None})
        plain.load_state_dict(model.state_dict(), strict=False)
        assert quality == coupling_quality(plain, [IMAGES]), "a convolution beside the attention is no part of it"
        assert 0 < quality.residual_max < 1e-3
        assert quality.doubly_stochastic_max > 0.1, "[CLS] reads by softmax, and is read by nobody else"

    def test_what_is_told_is_what_the_matrix_does(self):
        """Without a convolution the matrix is there to be looked at."""
        model = deit(attention_options={"local_conv": None})
        seen: list[tuple[torch.Tensor, ...]] = []
        hook = model.blocks[0].attn.mechanism.register_forward_pre_hook(lambda _, args: seen.append(args[:2]))
        quality = coupling_quality(model, [IMAGES])
        hook.remove()
        matrix = lotformer.attention.diagnose(model.blocks[0].attn.mechanism, *seen[0])
        errors = (matrix.column_sums - 1).abs()
        assert quality.doubly_stochastic_mean == pytest.approx(float(errors.mean()), rel=1e-3)
        assert quality.doubly_stochastic_max == pytest.approx(float(errors.max()), rel=1e-3)

    def test_the_folded_form(self):
        model = deit()
        before = coupling_quality(model, [IMAGES])
        lotformer.fold(model)
        folded = coupling_quality(model, [IMAGES])
        assert folded.doubly_stochastic_mean == pytest.approx(before.doubly_stochastic_mean, rel=1e-2)

    def test_other_mechanisms_have_no_masses_and_some_no_matrix(self):
        quality = coupling_quality(deit(attention="sinkformer"), [IMAGES])
        assert quality.residual_max is None
        assert quality.doubly_stochastic_mean < 0.1
        assert coupling_quality(deit(attention="hydra"), [IMAGES]) is None

    def test_the_model_is_left_as_it_was(self):
        model = deit().train()
        state, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
        coupling_quality(model, [IMAGES])
        assert [module.training for module in model.modules()] == modes
        assert not any(module._forward_pre_hooks for module in model.modules() if isinstance(module, LOT))
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "options",
    [{"prefix_tokens": 1, "window": None}, {"prefix_tokens": 1}, {"prefix_tokens": 0, "window": None}],
    ids=["prefix", "window", "transport alone"],
)
@pytest.mark.parametrize("kind", ["timm-vit", "vit"])
def test_converted_models_with_a_convolution(kind, options):
    model, batch = SMALL[kind].build(), SMALL[kind].batch()
    conv = "2d" if options["prefix_tokens"] else "1d"
    lotformer.convert(model, rank=4, local_conv=conv, **options)
    before = output(model, batch)
    quality = coupling_quality(model, [batch])
    assert quality.residual_max < 1e-4
    assert quality.doubly_stochastic_mean > 0
    assert torch.equal(output(model, batch), before)


def test_a_model_without_our_attention_is_refused():
    with pytest.raises(ValueError, match=r"holds no attention of lotformer: call `lotformer.convert\(model\)` first"):
        coupling_quality(SMALL["timm-vit"].build(), [SMALL["timm-vit"].batch()])


def test_what_is_watched_is_what_is_told_of_windows_over_images_that_are_not_square():
    vit = timm.models.vision_transformer.VisionTransformer(
        img_size=(32, 96), patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=3
    ).eval()
    lotformer.convert(vit, rank=4, window_size=3)
    images = torch.randn(2, 3, 32, 96)
    with torch.no_grad(), couplings_watched(vit) as missed:
        vit(images)
    assert list(missed) == [f"blocks.{i}.attn.mechanism" for i in range(2)]
    assert max(missed.values()) == pytest.approx(coupling_quality(vit, [images]).residual_max)
