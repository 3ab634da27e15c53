"""Layers and conversions with one side balanced, or none: what they promise, and that they save and export."""

from __future__ import annotations

import io

import numpy as np
import onnxruntime
import pytest
import torch

import lotformer
from lotformer.conversion import coupling_quality, recipe
from support.problems import lengths_mask
from support.small_models import SMALL, output

pytestmark = pytest.mark.small_windows

BALANCES = ["both", "keys", "none"]


@pytest.mark.parametrize("balance", BALANCES)
def test_the_plans_of_a_layer_are_those_it_applies(balance):
    layer = lotformer.LOTAttention(16, 2, rank=4, balance=balance, solver="newton", eps=0.3, key_masses="linear")
    q, k, v = torch.randn(3, 2, 2, 11, 8)
    mask = lengths_mask([11, 6], 11)
    plan = layer.mechanism.coupling(q, k, mask, mask)
    torch.testing.assert_close(layer.mechanism(q, k, v, mask, mask), plan.apply(v), rtol=1e-4, atol=1e-5)
    assert plan.residual().max() < 1e-5
    assert (plan.doubly_stochastic_error().max() < 1e-5) == (balance != "none")


@pytest.mark.parametrize("balance", ["keys", "none"])
def test_a_conversion_keeps_its_balance(balance, tmp_path):
    model, batch = SMALL["bert"].build(), SMALL["bert"].batch()
    lotformer.convert(model, rank=5, balance=balance)
    assert recipe(model).options["balance"] == balance
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(output(again, batch), output(model, batch))
    lotformer.revert(again)
    lotformer.convert(again, rank=5)
    assert not torch.equal(output(again, batch), output(model, batch))


@pytest.mark.parametrize("balance", BALANCES)
def test_column_sums_are_compared_with_the_masses_in_force(balance):
    model, batch = SMALL["bert"].build(), SMALL["bert"].batch()
    lotformer.convert(model, rank=5, balance=balance, key_masses="uniform")
    quality = coupling_quality(model, [batch])
    assert quality.residual_max < 1e-4
    assert (quality.doubly_stochastic_max < 1e-4) == (balance != "none")


@pytest.mark.parametrize("balance", ["keys", "none"])
def test_exports_with_a_dynamic_sequence(balance):
    layer = lotformer.LOTAttention(16, 2, rank=4, iters=2, balance=balance, prefix_tokens=1).eval()
    length = torch.export.Dim("length", min=4, max=512)
    program = torch.export.export(layer, (torch.randn(2, 17, 16),), dynamic_shapes=({1: length},))
    x = torch.randn(2, 31, 16)
    torch.testing.assert_close(program.module()(x), layer(x), rtol=1e-4, atol=1e-5)


def test_runs_in_onnxruntime():
    layer = lotformer.LOTAttention(16, 2, rank=4, iters=2, balance="keys", key_masses="query-aware").eval()
    length = torch.export.Dim("length", min=2, max=512)
    program = torch.onnx.export(
        layer, (torch.randn(2, 17, 16),), dynamic_shapes=({1: length},), dynamo=True, verbose=False
    )
    buffer = io.BytesIO()
    program.save(buffer)
    session = onnxruntime.InferenceSession(buffer.getvalue(), providers=["CPUExecutionProvider"])
    x = torch.randn(2, 29, 16)
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    np.testing.assert_allclose(got, layer(x).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_a_balance_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="balance must be one of 'both', 'keys', 'none', got 'rows'"):
        lotformer.LOTAttention(16, 2, balance="rows")
    with pytest.raises(ValueError, match="balance must be one of"):
        lotformer.convert(SMALL["bert"].build(), balance="rows")
