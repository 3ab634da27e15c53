"""Synthesizer and Diff attention are softmaxes of scores of their own, written out densely."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from lotformer.attention import build
from support.small_zoo import DIM, assert_equal, holes, make, tokens


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("kind", ["random", "factorized", "dense"])
@pytest.mark.parametrize("masked", [False, True], ids=["full", "padded"])
def test_synthesizer_is_softmax_of_its_scores(kind, masked):
    n, m = 13, 17
    q, k, v = tokens(2, n, m)
    model = make("synthesizer", kind=kind, max_length=20)
    mask = holes(2, m) if masked else torch.ones(2, m, dtype=torch.bool)
    if kind == "random":
        scores = model.scores[:, :n, :m].expand(2, -1, -1, -1)
    elif kind == "factorized":
        scores = (model.row_factor @ model.column_factor.mT)[:, :n, :m].expand(2, -1, -1, -1)
    else:
        hidden = F.relu(q @ model.inner + model.inner_bias)
        scores = hidden @ model.outer[:, :m].mT + model.outer_bias[:, :m].mT
    expected = scores.masked_fill(~mask[:, None, None], -torch.inf).softmax(-1) @ v
    assert_equal(expected, model(q, k, v, mask if masked else None))
    assert_equal(model(q, k, v), model(q, torch.randn_like(k), v))


def test_synthesizer_refuses_more_tokens_than_it_was_built_for():
    with pytest.raises(ValueError, match="max_length=16, got 17 queries"):
        make("synthesizer", max_length=16)(*tokens(1, 17))


@pytest.mark.parametrize("masked", [False, True], ids=["full", "padded"])
def test_diff_is_the_difference_of_two_softmaxes(masked):
    q, k, v = tokens(2, 9, 14)
    model = make("diff", layer=3)
    mask = holes(2, 14) if masked else torch.ones(2, 14, dtype=torch.bool)
    start = 0.8 - 0.6 * math.exp(-0.9)
    half = DIM // 2
    first, second = (
        (q[..., part] @ k[..., part].mT * half**-0.5).masked_fill(~mask[:, None, None], -torch.inf).softmax(-1)
        for part in (slice(half), slice(half, None))
    )
    products = (model.query_lambda * model.key_lambda).sum(-1).exp()
    balance = products[0] - products[1] + start
    expected = (first - balance * second) @ v
    expected = expected * (expected.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * model.norm * (1 - start)
    assert_equal(expected, model(q, k, v, mask if masked else None))


def test_diff_refuses_an_odd_head():
    with pytest.raises(ValueError, match="even head_dim, got 7"):
        build("diff", head_dim=7, num_heads=2)
