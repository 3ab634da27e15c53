"""What `torch.export` makes of a layer is saved, loaded and run: it gives what the layer gives, under autocast too."""

from __future__ import annotations

import io
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lotformer
from support.small_models import SMALL

LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "keys alone": {"balance": "keys"},
    "window of a text": {"window": "1d", "window_size": 5, "prefix_tokens": 1},
    "window of an image": {"window": "2d", "prefix_tokens": 1},
    "prefix": {"prefix_tokens": 2},
    "polarised prefix": {"prefix_tokens": 1, "polarize_prefix": True},
    "linear key masses": {"key_masses": "linear"},
    "query-aware key masses": {"key_masses": "query-aware"},
    "input-aware pivots": {"pivots": "input-aware"},
    "local mixing": {"local_conv": "1d", "prefix_tokens": 1},
}


def from_file(model: nn.Module, arguments: tuple[Tensor, ...], **given: Tensor) -> nn.Module:
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, arguments, given), file)
    file.seek(0)
    return torch.export.load(file).module()


CASES = [(kind, "newton", False) for kind in LAYERS]
CASES += [(kind, "sinkhorn", False) for kind in ("plain", "window of a text", "input-aware pivots")]
CASES += [(kind, "newton", True) for kind in ("plain", "window of a text", "query-aware key masses")]


@pytest.mark.parametrize(("kind", "solver", "autocast"), CASES)
def test_a_layer(kind: str, solver: str, autocast: bool) -> None:
    layer = lotformer.LOTAttention(16, num_heads=2, rank=4, eps=0.1, solver=solver, **LAYERS[kind]).eval()
    x = torch.randn(2, 16 + layer.mechanism.prefix_tokens, 16)
    mask = torch.arange(x.shape[1]) < torch.tensor([[x.shape[1]], [11]])
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        loaded = from_file(layer, (x,), mask=mask)
        got, expected = loaded(x, mask=mask), layer(x, mask=mask)
    assert got.dtype == expected.dtype == (torch.bfloat16 if autocast else torch.float32)
    tolerance = 2e-2 if autocast else 1e-4
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("folded", [False, True], ids=["as converted", "folded"])
def test_a_converted_text_encoder(folded: bool) -> None:
    model, batch = SMALL["bert"].build(), SMALL["bert"].batch()
    what_folds = {"window": None, "pivots": "fixed"} if folded else {}
    lotformer.convert(model, rank=4, solver="newton", **what_folds)
    if folded:
        lotformer.conversion.fold(model)
    model.config.return_dict = False
    got, expected = from_file(model, (), **batch)(**batch)[0], model(**batch)[0]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
