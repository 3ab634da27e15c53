"""Dropout by bytes: the same thing as PyTorch's, up to 1/256 in the probability."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lotformer.nn.dropout import ByteDropout


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_dropped_and_the_mean_are_right(p):
    torch.manual_seed(0)
    out = ByteDropout(p)(torch.ones(1001, 1003))
    assert out.unique().tolist() == pytest.approx([0.0, 256 / (256 - round(256 * p))])
    assert (out == 0).float().mean().item() == pytest.approx(round(256 * p) / 256, abs=2e-3)
    assert out.mean().item() == pytest.approx(1.0, abs=1e-2)


def test_every_byte_of_a_draw_is_uniform():
    torch.manual_seed(0)
    dropped = (ByteDropout(0.5)(torch.ones(200_000, 8)) == 0).float().mean(0)
    torch.testing.assert_close(dropped, torch.full((8,), 0.5), atol=0.01, rtol=0)


def test_gradients_pass_where_values_do():
    x = torch.ones(50, 7, requires_grad=True)
    out = ByteDropout(0.3)(x)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())


def test_it_repeats_with_the_seed():
    layer, x = ByteDropout(0.4), torch.ones(3, 5)
    outs = []
    for _ in range(2):
        torch.manual_seed(3)
        outs.append(layer(x))
    assert torch.equal(*outs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_dtype_is_kept(dtype):
    assert ByteDropout(0.2)(torch.ones(4, 4, dtype=dtype)).dtype == dtype


def test_evaluation_and_the_ends_are_pytorchs():
    x = torch.randn(6, 6)
    assert torch.equal(ByteDropout(0.5).eval()(x), x)
    assert torch.equal(ByteDropout(0.0)(x), x)
    assert torch.equal(ByteDropout(1.0)(x), nn.Dropout(1.0)(x))
    assert ByteDropout(0.5)(torch.empty(0, 3)).shape == (0, 3)
