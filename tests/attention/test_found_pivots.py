"""LOT with pivots found in the sample: softmax where everything is near, a coupling elsewhere, nothing to train."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lotformer import LOTAttention, attention, ops
from lotformer.attention.lot import LOT

HEADS, DIM = 2, 16

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "balanced": {"balance": "both", "solver": "newton"},
    "balanced sweeps": {"balance": "both", "iters": 3},
    "balanced, prefix": {"balance": "both", "solver": "newton", "prefix_tokens": 2},
    "window": {"window": "1d", "window_size": 7},
    "grid": {"window": "2d", "window_size": 3, "prefix_tokens": 1},
    "prefix": {"prefix_tokens": 1},
    "content": {"window": "1d", "window_size": 7, "content": 2, "content_most": 5},
    "convolution": {"window": "1d", "window_size": 7, "local_conv": "1d"},
}
every = pytest.mark.parametrize("form", FORMS)


def built(form: str, rank: int = 6, **options: Any) -> LOT:
    made = attention.build("lot", head_dim=DIM, num_heads=HEADS, rank=rank, pivots="found",
                           **{"balance": "none", **FORMS[form], **options})  # fmt: skip
    assert isinstance(made, LOT)
    return made


def tokens(n: int, batch: int = 2, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, HEADS, n, DIM, generator=generator) for _ in range(3)]


def length(mechanism: LOT) -> int:
    return 36 + mechanism.prefix_tokens


@given(st.integers(1, 40), st.integers(0, 2), st.integers(0, 5), st.booleans())
def test_it_is_softmax_where_every_key_is_a_group_of_its_own(n: int, prefix: int, more: int, balanced: bool) -> None:
    special = {"prefix_tokens": prefix} if prefix else {}
    mechanism = built("plain", rank=n + more, **special)
    q, k, v = tokens(n + prefix)
    with torch.no_grad():  # centres start along the sequence, so all keys are centres
        out = mechanism(q, k, v)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("learning", [False, True])
def test_it_is_softmax_where_every_key_is_near(learning: bool) -> None:
    mechanism = built("window", window_size=73)
    q, k, v = tokens(36)
    with torch.set_grad_enabled(learning):
        out = mechanism(q, k, v)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v), rtol=1e-4, atol=1e-5)
    assert mechanism.is_softmax(36)
    assert not mechanism.is_softmax(38)


@every
def test_masked_is_truncated_and_padding_may_hold_anything(form: str) -> None:
    mechanism = built(form)
    n, real = length(mechanism), length(mechanism) - (0 if form == "grid" else 5)
    q, k, v = tokens(n)
    mask = (torch.arange(n) < real).expand(2, -1)
    expected = mechanism(*(x[:, :, :real] for x in (q, k, v)))
    for junk in (0.0, float("nan"), 1e30):
        spoiled = [x.masked_fill(~mask[:, None, :, None], junk) for x in (q, k, v)]
        out = mechanism(*spoiled, mask, mask)
        torch.testing.assert_close(out[:, :, :real], expected, rtol=1e-3, atol=1e-4)
        assert not out[:, :, real:].any()


@every
def test_a_sample_does_not_depend_on_its_batch(form: str) -> None:
    mechanism = built(form)
    q, k, v = tokens(length(mechanism), batch=3)
    whole = mechanism(q, k, v)
    for i in range(3):
        torch.testing.assert_close(mechanism(q[i : i + 1], k[i : i + 1], v[i : i + 1])[0], whole[i])


@every
def test_every_parameter_learns_and_every_gradient_is_finite(form: str) -> None:
    mechanism = built(form)
    inputs = [x.requires_grad_() for x in tokens(length(mechanism))]
    (mechanism(*inputs) * torch.randn(2, HEADS, length(mechanism), DIM)).sum().backward()
    named = {**dict(mechanism.named_parameters()), **dict(zip("qkv", inputs, strict=True))}
    for name, x in named.items():
        assert x.grad is not None, name
        assert x.grad.isfinite().all(), name
        assert x.grad.abs().max() > 0, name


@pytest.mark.parametrize("solver", ["newton", "sinkhorn"])
def test_balanced_plans_are_doubly_stochastic(solver: str) -> None:
    mechanism = built("plain", balance="both", solver=solver, **({"iters": 200} if solver == "sinkhorn" else {}))
    q, k, v = tokens(50)
    plan = mechanism.coupling(q, k)
    torch.testing.assert_close(plan.column_sums(), torch.ones(2, HEADS, 50), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(plan.row_sums(), torch.ones(2, HEADS, 50))
    torch.testing.assert_close(plan.apply(v), mechanism(q, k, v), rtol=1e-4, atol=1e-5)


def test_the_plans_are_those_of_the_output() -> None:
    mechanism = built("plain")
    q, k, v = tokens(50)
    k2, v2 = torch.cat([k, k[:, :, :7]], 2), torch.cat([v, v[:, :, :7]], 2)
    torch.testing.assert_close(mechanism.coupling(q, k2).apply(v2), mechanism(q, k2, v2), rtol=1e-4, atol=1e-5)


def test_the_layer_reads_through_the_operator() -> None:
    """The body reads special tokens, its window and groups; the prefix reads everything by softmax."""
    mechanism = built("grid")
    q, k, v = tokens(37)
    body = q[:, :, 1:]
    reach = ops.Reach((6, 6), 1, 1)
    found = ops.found_attention(body, k, v, ops.Grouping(6, 3, 1), reach).out
    rows = F.scaled_dot_product_attention(q[:, :, :1], k, v)
    torch.testing.assert_close(mechanism(q, k, v), torch.cat([rows, found], 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["window", "grid", "balanced"])
def test_compiled_it_is_the_same(form: str) -> None:
    mechanism = built(form)
    q, k, v = tokens(length(mechanism))
    compiled = torch.compile(mechanism, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), mechanism(q, k, v), rtol=1e-4, atol=1e-5)


def test_a_layer_and_its_state_have_no_learned_pivots() -> None:
    layer = LOTAttention(24, 3, rank=4, pivots="found", balance="none", window="1d")
    names = {name for name, _ in layer.mechanism.named_parameters()}
    assert names == {"found.gain.bias", "found.shift.bias", "found.offset.bias"}
    assert layer(torch.randn(2, 11, 24)).shape == (2, 11, 24)
    assert "pivots=Pivots(kind='found'" in repr(layer)
