"""Layers on the meta device give shapes, as PyTorch's own do."""

from __future__ import annotations

import pytest
import torch

import lotformer
from lotformer import attention
from support.small_models import SMALL, output

OPTIONS = {
    "exact": {"solver": "newton", "balance": "keys"},
    "prefix": {"prefix_tokens": 1, "polarize_prefix": True, "local_conv": "1d"},
    "window": {"window": "2d", "local_conv": "2d", "dropout": 0.5},
    "aware": {"pivots": "input-aware", "key_masses": "query-aware", "learn_eps": True},
}
CASES = [*((name, {}) for name in attention.names()), *(("lot", options) for options in OPTIONS.values())]


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize(("name", "options"), CASES, ids=[*attention.names(), *OPTIONS])
def test_layers_give_shapes(name: str, options: dict[str, object], masked: bool) -> None:
    options = dict(options)
    drop = options.pop("dropout", 0.0)
    layer = lotformer.AttentionLayer(24, 3, name, attn_drop=drop, device="meta", **options)
    x = torch.empty(2, 16, 24, device="meta", requires_grad=True)
    mask = torch.empty(2, 16, dtype=torch.bool, device="meta") if masked else None
    out = layer(x, mask=mask, grid=(4, 4))
    assert (out.shape, out.device.type) == (x.shape, "meta")
    out.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("kind", ["vit", "timm-vit"])
def test_converted_models_give_shapes(kind: str) -> None:
    small = SMALL[kind]
    model, batch = small.build(), small.batch()
    lotformer.convert(model, rank=4)
    expected = output(model, batch)
    batch = batch.to("meta") if isinstance(batch, torch.Tensor) else {k: x.to("meta") for k, x in batch.items()}
    got = output(model.to("meta"), batch)
    assert (got.shape, got.device.type) == (expected.shape, "meta")
