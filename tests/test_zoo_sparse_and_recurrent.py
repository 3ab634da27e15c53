"""Sparse, recurrent, differential and transport mechanisms are what their definitions say, written out densely."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lotformer.attention import build, entry
from lotformer.attention.deltanet import delta_rule
from lotformer.attention.mamba2 import state_space

HEADS, DIM = 2, 8
MINE = [
    "quantum-ds", "lowrank-ot", "synthesizer", "local", "longformer", "reformer", "bigbird", "informer", "deltanet",
    "mamba2", "diff",
]  # fmt: skip
SMALL = {
    "local": {"block_size": 5},
    "longformer": {"window": 8, "global_tokens": 1},
    "bigbird": {"block_size": 4, "random_blocks": 2},
    "reformer": {"chunk_size": 4},
    "deltanet": {"chunk_size": 4},
    "mamba2": {"chunk_size": 4},
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def tokens(batch: int, n: int, m: int | None = None, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    return tuple(torch.randn(batch, HEADS, length, DIM, dtype=dtype) for length in (n, m or n, m or n))


def make(name: str, **options: object) -> torch.nn.Module:
    return build(name, head_dim=DIM, num_heads=HEADS, **options).double()


def dense_softmax(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~allowed, -torch.inf)
    return scores.softmax(-1).nan_to_num() @ v


def holes(batch: int, n: int, seed: int = 1) -> Tensor:
    """Some padding in the middle and at the end, but never everything."""
    mask = torch.rand(batch, n, generator=torch.Generator().manual_seed(seed)) > 0.3
    mask[:, 0] = True
    return mask


def band(n: int, reach: int, global_tokens: int) -> Tensor:
    i = torch.arange(n)
    near = (i[:, None] - i).abs() <= reach
    return near | (i < global_tokens) | (i[:, None] < global_tokens)


def same_block(n: int, size: int) -> Tensor:
    block = torch.arange(n) // size
    return block[:, None] == block


def assert_equal(expected: Tensor, got: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("masked", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize(
    ("name", "options", "pattern"),
    [
        ("local", {"block_size": 5}, lambda n: same_block(n, 5)),
        ("local", {"block_size": 64}, lambda n: same_block(n, 64)),
        ("longformer", {"window": 6}, lambda n: band(n, 3, 0)),
        ("longformer", {"window": 8, "global_tokens": 1}, lambda n: band(n, 4, 1)),
        ("longformer", {"window": 4, "global_tokens": 5}, lambda n: band(n, 2, 5)),
        ("longformer", {"window": 512, "global_tokens": 2}, lambda n: band(n, 256, 2)),
    ],
    ids=["local-5", "local-64", "window-6", "window-8-global-1", "window-4-global-5", "window-512"],
)
@pytest.mark.parametrize("n", [1, 3, 20, 37])
def test_windows_are_masked_softmax(name, options, pattern, n, masked):
    q, k, v = tokens(3, n)
    mask = holes(3, n) if masked else None
    allowed = pattern(n)[None, None] & (torch.ones(3, n, dtype=torch.bool) if mask is None else mask)[:, None, None]
    expected = dense_softmax(q, k, v, allowed)
    got = make(name, **options)(q, k, v, mask)
    assert_equal(expected, got)


def bigbird_pattern(n: int, size: int, plan: Tensor, used: int) -> Tensor:
    """Tokens allowed by BigBird's definition for a sample whose last real token is number `used`."""
    total, last = -(-n // size), max(-(-used // size) - 1, 0)
    allowed = torch.zeros(total, total, dtype=torch.bool)
    for block in range(total):
        if block in (0, last):
            allowed[block] = True
            continue
        random = [int(fraction * (last + 1)) for fraction in plan[block].tolist()]
        for other in {0, last, block - 1, block, block + 1, *random}:
            if other <= last:
                allowed[block, other] = True
    return allowed.repeat_interleave(size, 0).repeat_interleave(size, 1)[:n, :n]


@pytest.mark.parametrize("masked", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("n", [1, 7, 50, 61])
def test_bigbird_is_masked_softmax(n, masked):
    q, k, v = tokens(3, n)
    mask = holes(3, n) if masked else torch.ones(3, n, dtype=torch.bool)
    model = make("bigbird", block_size=4, random_blocks=3)
    patterns = torch.stack([bigbird_pattern(n, 4, model.plan, int(row.nonzero().max()) + 1) for row in mask])
    expected = dense_softmax(q, k, v, patterns[:, None] & mask[:, None, None])
    got = model(q, k, v, mask if masked else None)
    assert_equal(expected * mask[:, None, :, None], got * mask[:, None, :, None])


def test_bigbird_sees_random_blocks_and_few_of_them():
    model = make("bigbird", block_size=4, random_blocks=3)
    pattern = bigbird_pattern(400, 4, model.plan, 400)[::4, ::4]
    seen = pattern[1:-1].sum(-1)
    assert seen.max() == 8  # first, last, window of 3, random 3
    assert seen.double().mean() > 7


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
    expected = expected * (expected.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * full.norm
    assert_equal(expected, full(q, k, v), 1e-9)


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


@pytest.mark.parametrize("n", [1, 2, 7, 40])
def test_quantum_ds_is_doubly_stochastic(n):
    q, k, _ = tokens(2, n)
    matrix = make("quantum-ds")(q, k, torch.eye(n, dtype=q.dtype).expand(2, HEADS, n, n))
    assert (matrix >= 0).all()
    assert_equal(torch.ones(2, HEADS, n, dtype=q.dtype), matrix.sum(-1))
    assert_equal(torch.ones(2, HEADS, n, dtype=q.dtype), matrix.sum(-2))


@pytest.mark.parametrize(("n", "ridge"), [(9, 1.0), (5, 0.0)], ids=["with a ridge", "as published"])
def test_quantum_ds_is_the_squared_factor_of_gram_schmidt(n, ridge):
    q, k, v = tokens(1, n)
    scores = q @ k.mT * DIM**-0.5 + ridge * torch.eye(n, dtype=q.dtype)
    columns: list[Tensor] = []
    for j in range(n):
        column = scores[..., j]
        for other in columns:
            column = column - (column * other).sum(-1, keepdim=True) * other
        columns.append(F.normalize(column, dim=-1))
    assert_equal(torch.stack(columns, -1).square() @ v, make("quantum-ds", ridge=ridge)(q, k, v), 1e-8)


def test_quantum_ds_as_published_honours_padding_and_refuses_scores_without_full_rank():
    q, k, v = tokens(1, 5)
    mask = torch.tensor([[True, False, True, True, False]])
    model = make("quantum-ds", ridge=0.0)
    kept = [x[:, :, mask[0]] for x in (q, k, v)]
    assert_equal(model(*kept), model(q, k, v, mask, mask)[:, :, mask[0]], 1e-9)
    with pytest.raises(ValueError, match=f"at most head_dim={DIM} tokens, got {DIM + 1}"):
        model(*tokens(1, DIM + 1))


def test_low_rank_transport_has_the_marginals_and_the_rank():
    q, k, v = tokens(2, 40, 31)
    model = make("lowrank-ot", rank=5, inner_steps=300)
    query_plan, key_plan = model.factors(q, k)
    matrix = query_plan @ key_plan.mT
    assert_equal(torch.ones(2, HEADS, 40, dtype=q.dtype), matrix.sum(-1))
    assert_equal(torch.full((2, HEADS, 31), 40 / 31, dtype=q.dtype), matrix.sum(-2), 1e-5)
    assert torch.linalg.matrix_rank(matrix).max() <= 5
    assert_equal(matrix @ v, model(q, k, v))


def test_low_rank_transport_descends_towards_the_optimum():
    """More steps never cost more, and at full rank the plan nears the best assignment."""
    from scipy.optimize import linear_sum_assignment

    q, _, _ = tokens(1, 12)
    k = q[:, :, torch.randperm(12)] + 0.1 * torch.randn_like(q)
    cost = -(q @ k.mT) * DIM**-0.5

    def price(steps: int) -> Tensor:
        query_plan, key_plan = make("lowrank-ot", rank=12, outer_steps=steps, inner_steps=100).factors(q, k)
        return (query_plan @ key_plan.mT * cost).sum((-2, -1)) / 12

    prices = torch.stack([price(steps) for steps in (1, 4, 16, 64)])
    assert (prices.diff(dim=0) <= 1e-6).all()
    for head in range(HEADS):
        best = cost[0, head].numpy()[linear_sum_assignment(cost[0, head].numpy())].mean()
        independent = cost[0, head].mean()
        assert (independent - prices[-1, 0, head]) / (independent - best) > 0.8


def reformer_scores(q: Tensor, allowed: Tensor) -> Tensor:
    """Scores of shared queries and keys over allowed pairs; oneself only when alone."""
    scores = (q @ F.normalize(q, dim=-1).mT) * DIM**-0.5
    scores = scores.masked_fill(torch.eye(q.shape[2], dtype=torch.bool), -1e5)
    return scores.masked_fill(~allowed, -1e9)


@pytest.mark.parametrize("masked", [False, True], ids=["full", "padded"])
def test_reformer_with_one_bucket_is_shared_softmax(masked):
    q, k, v = tokens(2, 19)
    mask = holes(2, 19) if masked else torch.ones(2, 19, dtype=torch.bool)
    scores = reformer_scores(q, mask[:, None, None])
    got = make("reformer", num_buckets=1, chunk_size=32, num_hashes=3)(q, k, v, mask, mask)
    assert_equal(scores.softmax(-1) @ v * mask[:, None, :, None], got)


def test_reformer_is_softmax_within_buckets_averaged_over_rounds():
    q, k, v = tokens(2, 30)
    model = make("reformer", num_buckets=4, chunk_size=32, num_hashes=3)
    rotated = torch.einsum("bhnd,hrdc->bhrnc", q, model.rotations)
    bucket = torch.cat([rotated, -rotated], -1).argmax(-1)
    scores = torch.stack([reformer_scores(q, bucket[:, :, r, :, None] == bucket[:, :, r, None, :]) for r in range(3)])
    normaliser = scores.logsumexp(-1, keepdim=True)
    rounds = (scores - normaliser).exp() @ v
    assert_equal((normaliser.softmax(0) * rounds).sum(0), model(q, k, v))


def test_reformer_attends_within_its_chunk_and_the_one_before():
    """With one bucket the order is that of the tokens, so the pattern is known."""
    q, k, v = tokens(1, 22)
    chunk = torch.arange(22) // 5
    allowed = (chunk[:, None] - chunk == 0) | (chunk[:, None] - chunk == 1)
    scores = reformer_scores(q, allowed)
    assert_equal(scores.softmax(-1) @ v, make("reformer", num_buckets=1, chunk_size=5)(q, k, v))


def test_informer_with_every_query_active_is_softmax():
    q, k, v = tokens(2, 17, 23)
    everything = torch.ones(17, 23, dtype=torch.bool)
    assert_equal(dense_softmax(q, k, v, everything), make("informer", factor=9)(q, k, v))


def test_informer_gives_softmax_to_the_most_selective_queries_and_the_mean_to_the_rest():
    n = 200
    q, k, v = tokens(1, n)
    sharp = torch.arange(n) % 40 == 3  # five queries with far larger scores
    q = torch.where(sharp[:, None], 30 * q, 0.01 * q)
    model = make("informer", factor=1)
    got = model(q, k, v)
    expected = torch.where(
        sharp[:, None], dense_softmax(q, k, v, torch.ones(n, n, dtype=torch.bool)), v.mean(2, keepdim=True)
    )
    assert math.ceil(math.log(n)) == 6
    matches = (got - expected).abs().amax(-1) < 1e-9
    assert matches[:, :, sharp].all()
    assert ((~matches).sum(-1) == 1).all()  # the sixth active query is one of the flat ones


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


@pytest.mark.parametrize("name", MINE)
def test_padding_is_the_truncated_sequence_and_its_contents_never_matter(name):
    """Right padding with NaN and inf, one sample full, one padded, one empty; values and gradients."""
    n, real = 29, 18
    model = make(name, **SMALL.get(name, {}))
    mask = torch.ones(3, n, dtype=torch.bool)
    mask[1, real:] = False
    mask[2] = False
    clean = tokens(3, n)
    dirty = [x.clone() for x in clean]
    for x in dirty:
        x[1, :, real:] = torch.nan
        x[2] = torch.inf
        x.requires_grad_()
    out = model(*dirty, mask, mask)
    assert_equal(model(*(x[:1] for x in clean)), out[:1], 1e-8)
    assert_equal(model(*(x[1:2, :, :real] for x in clean)), out[1:2, :, :real], 1e-8)
    assert out[1, :, real:].abs().max() == 0
    assert out[2].abs().max() == 0
    out.square().sum().backward()
    for x in dirty:
        if x.grad is not None:  # Reformer and Synthesizer do not read every input
            assert x.grad.isfinite().all()
            assert x.grad[1, :, real:].abs().max() == 0
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", [name for name in MINE if entry(name).needs_equal_lengths])
def test_self_attention_only_is_declared_and_refused(name):
    with pytest.raises(ValueError, match=f"{name} needs as many keys as queries.*got 7 queries and 9 keys"):
        make(name)(*tokens(1, 7, 9))


@pytest.mark.parametrize("name", [name for name in MINE if name != "lowrank-ot"])  # its step is a constant to autograd
def test_gradients_are_those_of_the_forward(name):
    """Mechanisms that choose discretely (LSH, ProbSparse) are smooth around these inputs."""
    model = make(name, **SMALL.get(name, {}))
    q, k, v = (x[:, :, :9].requires_grad_() for x in tokens(1, 9))
    mask = torch.ones(1, 9, dtype=torch.bool)
    mask[0, 7:] = False
    torch.autograd.gradcheck(lambda *x: model(*x, mask, mask), (q, k, v), atol=1e-6)
