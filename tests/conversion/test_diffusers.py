"""diffusers' UNets and transformers: self-attention is converted, cross-attention is not, and all can be undone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lotformer
from support.small_models import output

diffusers = pytest.importorskip("diffusers")


def _unet() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, cross_attention_dim=12,
        attention_head_dim=2, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    batch = {"sample": torch.randn(2, 4, 8, 8), "timestep": torch.tensor(3),
             "encoder_hidden_states": torch.randn(2, 5, 12)}  # fmt: skip
    return model.eval(), batch


def _plain_unet() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Attention on images rather than sequences: group norm and residual connection inside."""
    torch.manual_seed(0)
    model = diffusers.UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
        attention_head_dim=4, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return model.eval(), {"sample": torch.randn(2, 3, 8, 8), "timestep": torch.tensor(3)}


def _transformer() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8, patch_size=2,
        num_embeds_ada_norm=10, norm_num_groups=4,
    )  # fmt: skip
    batch = {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([3, 4]),
             "class_labels": torch.tensor([1, 2])}  # fmt: skip
    return model.eval(), batch


MODELS = {"unet": (_unet, 4, 4), "unet-without-text": (_plain_unet, 4, 0), "transformer": (_transformer, 2, 0)}


@pytest.mark.parametrize("kind", MODELS)
class TestEveryModel:
    def test_self_attention_is_converted_and_reverting_brings_the_original_back(self, kind):
        make, converted, skipped = MODELS[kind]
        model, batch = make()
        before = output(model, batch)
        report = lotformer.convert(model, rank=3, probe=batch)
        assert (len(report.converted), len(report.skipped)) == (converted, skipped)
        assert all(layer.reason == "it is cross-attention" for layer in report.skipped)
        assert not torch.equal(output(model, batch), before)
        lotformer.revert(model)
        assert torch.equal(output(model, batch), before)

    def test_softmax_by_way_of_conversion_is_the_original_model(self, kind):
        model, batch = MODELS[kind][0]()
        before = output(model, batch)
        lotformer.convert(model, "softmax")
        torch.testing.assert_close(output(model, batch), before)

    def test_calibration_lowers_the_error(self, kind):
        model, batch = MODELS[kind][0]()
        lotformer.convert(model, rank=3)
        report = lotformer.calibrate(model, [batch], steps=8)
        assert report.mean_error_after < report.mean_error_before


def test_a_converted_unet_is_saved_and_loaded(tmp_path):
    model, batch = _unet()
    lotformer.convert(model, rank=3)
    lotformer.conversion.save(model, tmp_path / "unet.safetensors")
    other, _ = _unet()
    lotformer.conversion.load(other, tmp_path / "unet.safetensors")
    assert torch.equal(output(other, batch), output(model, batch))
