"""Layers that read queries and keys off their input compute what layers that form them compute."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lotformer
from lotformer.attention.lot import LOT
from support.problems import lengths_mask

KINDS = {
    "plain": {},
    "keys": {"balance": "keys", "solver": "newton", "eps": 0.3},
    "linear": {"key_masses": "linear", "learn_eps": True},
    "query-aware": {"key_masses": "query-aware", "scale": 0.2},
    "prefix": {"prefix_tokens": 2, "prefix_beta": 0.7, "key_masses": "query-aware"},
    "polarised": {"prefix_tokens": 1, "polarize_prefix": True, "local_conv": "1d", "key_masses": "linear"},
}


def make_layer(dim: int = 24, heads: int = 2, **options) -> lotformer.LOTAttention:
    layer = lotformer.LOTAttention(dim, heads, **{"rank": 5, "solver": "sinkhorn", **options}).double()
    with torch.no_grad():
        for parameter in layer.mechanism.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        if layer.qkv.bias is not None:
            layer.qkv.bias.normal_()
    return layer


def formed(layer: lotformer.LOTAttention) -> lotformer.LOTAttention:
    """The same layer, watched, so that it forms its queries and keys."""
    twin = copy.deepcopy(layer)
    twin.qkv.register_forward_hook(lambda *_: None)
    return twin


def count_calls(monkeypatch) -> list[int]:
    calls = []
    inner = LOT.attend_unformed
    monkeypatch.setattr(LOT, "attend_unformed", lambda *a, **k: calls.append(1) or inner(*a, **k))
    return calls


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_formed_queries_and_keys(kind, bias, monkeypatch):
    layer = make_layer(qkv_bias=bias, **KINDS[kind])
    twin = formed(layer)
    x = torch.randn(2, 13, 24, dtype=torch.float64)
    mask = lengths_mask([13, 8], 13)
    calls = count_calls(monkeypatch)
    expected, cotangent = twin(x, mask=mask), torch.randn(2, 13, 24, dtype=torch.float64)
    assert not calls
    got = layer(x, mask=mask)
    assert calls
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)
    mine, theirs = (torch.autograd.grad(out, list(m.parameters()), cotangent, allow_unused=True)
                    for out, m in ((got, layer), (expected, twin)))  # fmt: skip
    for (name, _), a, b in zip(layer.named_parameters(), mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", KINDS)
def test_padding_may_hold_anything(kind):
    layer = make_layer(**KINDS[kind])
    x, mask = torch.randn(2, 13, 24, dtype=torch.float64), lengths_mask([13, 8], 13)
    dirty = x.masked_fill(~mask[..., None], float("nan"))
    torch.testing.assert_close(layer(dirty, mask=mask)[1:, :8], layer(x[1:, :8]))


def test_the_state_dict_is_that_of_any_layer():
    layer = make_layer()
    assert layer.qkv.weight.shape == (72, 24)
    assert set(layer.state_dict()) == set(formed(layer).state_dict())


@pytest.mark.parametrize(
    "change",
    [
        {"pivots": "input-aware"},
        {"qk_norm": True, "norm_layer": nn.LayerNorm},
        {"rank": 30},
    ],
    ids=["input-aware pivots", "qk-norm", "more pivots than channels"],
)
def test_queries_and_keys_are_formed_where_they_have_to_be(change, monkeypatch):
    calls = count_calls(monkeypatch)
    lotformer.LOTAttention(24, 2, **{"rank": 5, **change})(torch.randn(2, 13, 24))
    assert not calls


def test_half_precision_keeps_queries_and_keys(monkeypatch):
    calls = count_calls(monkeypatch)
    layer = lotformer.LOTAttention(24, 2, rank=5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(torch.randn(2, 13, 24))
    layer.bfloat16()(torch.randn(2, 13, 24, dtype=torch.bfloat16))
    assert not calls


def test_a_single_short_sequence_is_not_worth_the_weights_of_the_scores(monkeypatch):
    calls = count_calls(monkeypatch)
    layer = lotformer.LOTAttention(24, 2, rank=11)
    layer(torch.randn(1, 4, 24))
    assert not calls
    layer(torch.randn(8, 64, 24))
    assert calls


def test_whoever_watches_the_parts_sees_queries_and_keys():
    layer = lotformer.LOTAttention(24, 2, rank=5)
    seen = []
    layer.mechanism.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape))
    layer(torch.randn(2, 13, 24))
    assert seen == [(2, 2, 13, 12)]
