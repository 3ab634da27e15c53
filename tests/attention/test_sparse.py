"""Windows, BigBird, Reformer and Informer are what their definitions say, written out densely."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from support.small_zoo import assert_equal, dense_softmax, holes, make, tokens


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def band(n: int, reach: int, global_tokens: int) -> Tensor:
    i = torch.arange(n)
    near = (i[:, None] - i).abs() <= reach
    return near | (i < global_tokens) | (i[:, None] < global_tokens)


def same_block(n: int, size: int) -> Tensor:
    block = torch.arange(n) // size
    return block[:, None] == block


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


def reformer_scores(q: Tensor, allowed: Tensor) -> Tensor:
    """Scores of shared queries and keys over allowed pairs; oneself only when alone."""
    scores = q @ F.normalize(q, dim=-1).mT
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
    model = make("reformer", num_buckets=4, chunk_size=32, num_hashes=3, across_buckets=False)
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
