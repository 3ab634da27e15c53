"""Mechanisms with a 2-D part get the grid of the host: of any image that passes, not only of square ones."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
import transformers

import lotformer
from lotformer.attention.lot import LOT
from lotformer.nn.depthwise import DepthwiseMixing
from support.small_models import SMALL, output

LOCAL = {"rank": 5, "prefix_tokens": 1, "local_conv": "2d"}


def vit(**options) -> torch.nn.Module:
    sizes = {"patch_size": 5, "embed_dim": 24, "num_heads": 3, "depth": 2, "num_classes": 5, "img_size": (20, 30)}
    return timm.create_model("vit_tiny_patch16_224", **{**sizes, **options}).eval()


def hugging_face(kind: str = "ViT", **options) -> torch.nn.Module:
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20, patch_size=5,
        **{"image_size": (20, 30), **options},
    )  # fmt: skip
    return getattr(transformers, f"{kind}Model")(config).eval()


def grids(model: torch.nn.Module, batch) -> list[tuple[int, int]]:
    """The grids that the convolutions inside the mechanisms see."""
    seen: list[tuple[int, int]] = []
    handles = [
        part.conv.register_forward_hook(lambda _, inputs, out: seen.append(tuple(inputs[0].shape[-2:])))
        for part in model.modules()
        if isinstance(part, DepthwiseMixing)
    ]
    output(model, batch)
    for handle in handles:
        handle.remove()
    return seen


class TestTimm:
    def test_an_image_that_is_not_square(self):
        model = vit()
        report = lotformer.convert(model, **LOCAL)
        assert report.probe is not None
        assert grids(model, torch.randn(2, 3, 20, 30)) == [(4, 6)] * 2

    def test_images_of_any_size(self):
        model = vit(dynamic_img_size=True)
        lotformer.convert(model, **LOCAL)
        assert grids(model, torch.randn(2, 3, 20, 30)) == [(4, 6)] * 2
        assert grids(model, torch.randn(2, 3, 10, 40)) == [(2, 8)] * 2

    @pytest.mark.parametrize("mechanism", ["flatten", "polaformer", "enhanced"])
    def test_other_mechanisms_with_a_2d_part(self, mechanism):
        model = vit(class_token=False, global_pool="avg")
        lotformer.convert(model, mechanism)
        assert grids(model, torch.randn(2, 3, 20, 30)) == [(4, 6)] * 2


class TestHuggingFace:
    @pytest.mark.parametrize(("kind", "size"), [("ViT", (20, 30)), ("Dinov2", 20)])
    def test_an_image_that_is_not_square(self, kind, size):
        model = hugging_face(kind, image_size=size)
        lotformer.convert(model, **LOCAL)
        assert grids(model, {"pixel_values": torch.randn(2, 3, 20, 30)}) == [(4, 6)] * 2

    def test_interpolated_positions(self):
        model = hugging_face(image_size=20)
        lotformer.convert(model, **LOCAL)
        batch = {"pixel_values": torch.randn(2, 3, 30, 10), "interpolate_pos_encoding": True}
        assert grids(model, batch) == [(6, 2)] * 2

    def test_a_loaded_model(self, tmp_path):
        model, batch = hugging_face(), {"pixel_values": torch.randn(2, 3, 20, 30)}
        lotformer.convert(model, **LOCAL)
        model.save_pretrained(tmp_path)
        again = type(model).from_pretrained(tmp_path).eval()
        assert torch.equal(output(again, batch), output(model, batch))


def test_text_has_no_grid():
    model = SMALL["bert"].build()
    lotformer.convert(model, rank=5, local_conv="2d")
    assert grids(model, {"input_ids": torch.randint(3, 60, (2, 16))}) == [(4, 4)] * 2


def test_copies_have_a_grid_of_their_own_and_reverting_forgets_it():
    model, wide, high = vit(dynamic_img_size=True), torch.randn(1, 3, 20, 30), torch.randn(1, 3, 30, 20)
    before, hooks = output(model, wide), len(model.patch_embed.proj._forward_hooks)
    lotformer.convert(model, **LOCAL)
    twin = copy.deepcopy(model)
    output(model, wide)
    assert grids(twin, high) == [(6, 4)] * 2
    assert grids(model, wide) == [(4, 6)] * 2
    lotformer.revert(model)
    assert len(model.patch_embed.proj._forward_hooks) == hooks
    assert torch.equal(output(model, wide), before)
    assert any(isinstance(m, LOT) for m in twin.modules())


def test_the_grid_survives_compilation():
    model, x = vit(dynamic_img_size=True), torch.randn(2, 3, 20, 30)
    lotformer.convert(model, **LOCAL)
    expected = output(model, x)
    torch.testing.assert_close(output(torch.compile(model, backend="eager"), x), expected)
