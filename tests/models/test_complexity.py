"""Parameters and multiply-adds, against counts that others have published."""

from __future__ import annotations

import pytest

import lotformer.models  # noqa: F401  registers the models

# isort: split
import timm

from lotformer.models.complexity import complexity


@pytest.mark.parametrize(
    ("name", "options", "millions", "giga"),
    [
        ("deit_tiny_patch16_224", {}, 5.717, 1.254),  # timm's table: 5.7 M, 1.3 G
        ("lot_deit_tiny_patch16_224", {"attention": "softmax"}, 5.717, 1.254),
        ("lot_deit_tiny_patch16_224", {}, 5.813, 1.139),
        ("lot_swin_tiny", {}, 28.31, 4.526),
        ("lot_swin_tiny", {"attention": "softmax"}, 28.288, 4.49),
        ("lot_pvt_tiny", {"attention": "softmax"}, 13.229, 1.933),  # the publication: 13.2 M, 1.9 G
    ],
)
def test_counts(name: str, options: dict[str, str], millions: float, giga: float) -> None:
    counted = complexity(timm.create_model(name, **options))
    assert counted.parameters / 1e6 == pytest.approx(millions, rel=1e-3)
    assert counted.macs / 1e9 == pytest.approx(giga, rel=1e-3)


def test_lot_is_counted_by_its_products() -> None:
    """Two score products, two products with the values, the convolution and the prefix row: no more, no less."""
    tokens, width, rank, heads = 64, 96, 32, 3
    sizes = {"img_size": 64, "patch_size": 8, "num_classes": 0}
    with_lot = complexity(timm.create_model("lot_vit_half", depth=1, **sizes), (64, 64)).macs
    without = complexity(timm.create_model("lot_vit_half", depth=0, **sizes), (64, 64)).macs
    projections = 12 * width**2 * (tokens + 1)
    products = 4 * tokens * rank * (width // heads) * heads
    convolution = 9 * width * tokens
    prefix = 2 * 2 * width * (tokens + 1) + width * (tokens + 1)  # like and opposite signs, then the values
    assert with_lot - without == pytest.approx(projections + products + convolution + prefix, rel=0.01)


def test_convolutions_of_other_mechanisms_are_counted() -> None:
    sizes = {"img_size": 64, "patch_size": 8, "num_classes": 0, "depth": 1, "attention": "flatten"}
    with_it, without = (
        complexity(timm.create_model("lot_vit_half", attention_options={"local_conv": on}, **sizes), (64, 64)).macs
        for on in (True, False)
    )
    assert with_it - without == 25 * 96 * 64
