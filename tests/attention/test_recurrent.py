"""DeltaNet and Mamba-2 in chunks are their recurrences, step by step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lotformer.attention.deltanet import delta_rule
from lotformer.attention.mamba2 import state_space
from support.small_zoo import DIM, HEADS, assert_equal, holes, make, tokens


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def delta_recurrence(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    state = torch.zeros(*q.shape[:2], q.shape[-1], v.shape[-1], dtype=q.dtype)
    rows = []
    for t in range(q.shape[2]):
        key, value = k[:, :, t, :, None], v[:, :, t, None, :]
        state = state + beta[:, :, t, None] * key @ (value - key.mT @ state)
        rows.append((q[:, :, t, None, :] @ state).squeeze(2))
    return torch.stack(rows, 2)


@given(n=st.integers(1, 70), chunk=st.integers(1, 40))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_the_delta_rule_in_chunks_is_the_recurrence(n, chunk):
    q, k, v = tokens(2, n)
    k, beta = F.normalize(k, dim=-1), torch.rand(2, HEADS, n, 1, dtype=q.dtype)
    assert_equal(delta_recurrence(q, k, v, beta), delta_rule(q, k, v, beta, chunk), 1e-9)


@given(n=st.integers(1, 70), chunk=st.integers(1, 40))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_the_state_space_in_chunks_is_the_recurrence(n, chunk):
    q, k, x = tokens(2, n)
    log_decay = -10 * torch.rand(2, HEADS, n, 1, dtype=q.dtype)
    state = torch.zeros(2, HEADS, DIM, DIM, dtype=q.dtype)
    rows = []
    for t in range(n):
        state = log_decay[:, :, t, None].exp() * state + k[:, :, t, :, None] @ x[:, :, t, None, :]
        rows.append((q[:, :, t, None, :] @ state).squeeze(2))
    assert_equal(torch.stack(rows, 2), state_space(q, k, x, log_decay, chunk), 1e-9)


def short_conv(x: Tensor, weight: Tensor) -> Tensor:
    """The causal depthwise convolution, token by token."""
    taps = weight.shape[-1]
    weight = weight.reshape(x.shape[1], 1, x.shape[3], taps)
    padded = F.pad(x, (0, 0, taps - 1, 0))
    return F.silu(sum(padded[:, :, i : i + x.shape[2]] * weight[..., i] for i in range(taps)))


@pytest.mark.parametrize("bidirectional", [False, True], ids=["causal", "both-ways"])
def test_deltanet_is_its_published_block(bidirectional):
    q, k, v = tokens(2, 13)
    model = make("deltanet", bidirectional=bidirectional, chunk_size=4)
    beta = torch.sigmoid((k * model.gate[:, None]).sum(-1) + model.gate_bias[:, None])[..., None]

    def causal(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        q, k, v = (short_conv(x, conv.conv.weight) for x, conv in zip((q, k, v), model.convs, strict=True))
        return delta_recurrence(F.normalize(q, dim=-1) * DIM**-0.5, F.normalize(k, dim=-1), v, beta)

    expected = causal(q, k, v, beta)
    if bidirectional:
        expected = (expected + causal(*(x.flip(2) for x in (q, k, v, beta))).flip(2)) / 2
    expected = expected * (expected.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * model.norm
    assert_equal(expected, model(q, k, v), 1e-9)


def test_mamba2_is_a_decaying_attention_matrix():
    inputs = tokens(2, 11)
    model = make("mamba2", bidirectional=False, conv_size=None, norm=False, chunk_size=4)
    step = F.softplus((inputs[1] * model.step[:, None]).sum(-1) + model.step_bias[:, None])
    log_decay = -model.log_rate.exp()[:, None] * step
    q, k, v = (F.silu(x) for x in inputs)
    matrix = torch.zeros(2, HEADS, 11, 11, dtype=q.dtype)
    for i in range(11):
        for j in range(i + 1):
            decay = log_decay[:, :, j + 1 : i + 1].sum(-1).exp()
            matrix[:, :, i, j] = (q[:, :, i] * k[:, :, j]).sum(-1) * decay * step[:, :, j]
    assert_equal(matrix @ v + model.skip[:, None, None] * v, model(*inputs), 1e-9)


def test_mamba2_gates_by_the_query_and_normalises():
    q, k, v = tokens(2, 11)
    bare = make("mamba2", conv_size=None, norm=False)
    full = make("mamba2", conv_size=None)
    full.load_state_dict(bare.state_dict(), strict=False)
    expected = bare(q, k, v) * F.silu(q @ full.gate)
    by_head = expected * (expected.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    over_all = expected * (expected.square().mean((1, 3), keepdim=True) + 1e-5).rsqrt()
    with torch.no_grad():
        full.norm.normal_()
    weight = full.norm.view(HEADS, 1, DIM)
    assert_equal(over_all * weight, full(q, k, v), 1e-9)
    full.norm_groups = HEADS
    assert_equal(by_head * weight, full(q, k, v), 1e-9)


@pytest.mark.parametrize("name", ["deltanet", "mamba2"])
def test_recurrent_mechanisms_look_back_only_when_causal(name):
    q, k, v = tokens(1, 21)
    causal, both = make(name, bidirectional=False, chunk_size=4), make(name, chunk_size=4)
    later = [x.clone() for x in (q, k, v)]
    for x in later:
        x[:, :, 15:] += 1
    assert_equal(causal(q, k, v)[:, :, :15], causal(*later)[:, :, :15])
    assert (both(q, k, v) - both(*later))[:, :, :15].abs().max() > 1e-3


@pytest.mark.parametrize("name", ["deltanet", "mamba2"])
def test_holes_in_the_sequence_do_not_advance_the_state(name):
    """Without the convolution, a sequence with holes is the sequence without them."""
    q, k, v = tokens(1, 23)
    mask = holes(1, 23)
    model = make(name, conv_size=None, chunk_size=4)
    kept = [x[:, :, mask[0]] for x in (q, k, v)]
    assert_equal(model(*kept), model(q, k, v, mask, mask)[:, :, mask[0]], 1e-9)
