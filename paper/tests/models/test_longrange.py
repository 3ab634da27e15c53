"""The long-range encoder: any mechanism, padding that never matters, lengths that are checked."""

from __future__ import annotations

import copy

import pytest
import torch

from lotformer import attention
from lotformer_paper.models.longrange import LocallyMixed, LongRangeEncoder
from support.small_zoo import SMALL

TINY = {"vocabulary": 20, "max_length": 16, "classes": 3, "dim": 8, "mlp_dim": 16}


def tokens(*shape: int, low: int = 1) -> torch.Tensor:
    return torch.randint(low, 20, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("local_mixing", [False, True], ids=["plain", "mixed"])
@pytest.mark.parametrize("grid", [None, (4, 4)], ids=["1d", "2d"])
@pytest.mark.parametrize("name", attention.names())
def test_every_mechanism_runs_forward_and_backward(name, grid, local_mixing):
    model = LongRangeEncoder(
        **TINY, grid=grid, attention=name, attention_options=SMALL.get(name), local_mixing=local_mixing
    )
    logits = model(tokens(2, 16))
    assert logits.shape == (2, 3)
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.blocks.parameters() if p.requires_grad)


@pytest.mark.parametrize("local_mixing", [False, True], ids=["plain", "mixed"])
@pytest.mark.parametrize("name", ["lot", "softmax", "linear-transformer", "polaformer"])
def test_padding_never_matters(name, local_mixing):
    torch.manual_seed(0)
    model = LongRangeEncoder(**TINY, attention=name, local_mixing=local_mixing).eval()
    short = tokens(2, 9)
    padded = torch.cat([short, tokens(2, 5)], 1)
    mask = torch.arange(14).expand(2, -1) < 9
    torch.testing.assert_close(model(padded, mask), model(short), atol=1e-5, rtol=1e-5)


def test_a_longer_sequence_is_an_error():
    with pytest.raises(ValueError, match=r"at most 16 tokens, got 17"):
        LongRangeEncoder(**TINY)(tokens(1, 17))


def test_mixing_is_over_the_grid_where_there_is_one():
    one, two = (LongRangeEncoder(**TINY, attention="softmax", local_mixing=True, grid=g) for g in (None, (4, 4)))
    kinds = [model.blocks[0].attn.mechanism.local.kind for model in (one, two)]
    assert kinds == ["1d", "2d"]
    own = LongRangeEncoder(**TINY, attention="polaformer", local_mixing=True, grid=(4, 4)).blocks[0].attn.mechanism
    assert not isinstance(own, LocallyMixed)
    assert LongRangeEncoder(**TINY, attention="lot").blocks[0].attn.mechanism.local is None


def test_published_pooling_masks_token_zero_and_divides_by_the_padded_length():
    torch.manual_seed(0)
    published = LongRangeEncoder(**{**TINY, "max_length": 12}, pooling="published").eval()
    real = copy.deepcopy(published)
    real.pooling = "real"
    x = tokens(2, 12)
    x[:, ::3] = 0
    mask = x != 0
    torch.testing.assert_close(published.encode(x), real.encode(x, mask) * 8 / 16)
    # whatever mask is given: the protocol looks at the tokens alone
    torch.testing.assert_close(published.encode(x, torch.ones_like(mask)), published.encode(x))


def test_learned_pooling_starts_as_the_mean_and_honours_padding():
    torch.manual_seed(0)
    learned = LongRangeEncoder(**TINY, pooling="learned").eval()
    mean = LongRangeEncoder(**TINY, pooling="real").eval()
    mean.load_state_dict(learned.state_dict(), strict=False)
    mask = torch.arange(14).expand(2, -1) < 9
    torch.testing.assert_close(learned.encode(tokens(2, 14), mask), mean.encode(tokens(2, 14), mask))
    torch.nn.init.normal_(learned.pool.queries.weight)
    short, padded = tokens(2, 9), torch.cat([tokens(2, 9), tokens(2, 5)], 1)
    torch.testing.assert_close(learned(padded, mask), learned(short), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(learned.encode(short), mean.encode(short), atol=1e-2)


def test_learned_pooling_sees_the_last_couplings_where_a_mean_cannot():
    """With unit columns, the mean of the last layer's output is that of the values, whatever the couplings."""

    def slope(pooling):
        torch.manual_seed(0)
        exact = {"rank": 4, "solver": "newton", "tol": None, "learn_masses": False}
        model = LongRangeEncoder(**TINY, depth=1, dropout=0.0, pooling=pooling, attention_options=exact).double()
        if pooling == "learned":
            torch.nn.init.normal_(model.pool.queries.weight)
        model.blocks[0].mlp.requires_grad_(False)[-2].weight.zero_()  # the residual stream alone
        model.blocks[0].mlp[-2].bias.zero_()
        model.norm = torch.nn.Identity()
        model.encode(tokens(2, 16)).square().sum().backward()
        return model.blocks[0].attn.mechanism.pivots.points.bias.grad.norm()

    assert slope("real") < 1e-8 * slope("learned")


def test_two_documents_are_compared():
    torch.manual_seed(0)
    model = LongRangeEncoder(**TINY, documents=2).eval()
    pair = tokens(3, 2, 10)
    a, b = model.encode(pair[:, 0]), model.encode(pair[:, 1])
    torch.testing.assert_close(model(pair), model.head(torch.cat([a, b, a * b, a - b], 1)))
    mask = torch.arange(10).expand(3, 2, -1) < 7
    torch.testing.assert_close(model(pair, mask), model(pair[..., :7]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("documents", "shape", "message"),
    [(1, (2, 2, 5), r"\(B, N\)"), (2, (2, 5), r"\(B, 2, N\)"), (2, (2, 3, 5), r"\(B, 2, N\)")],
)
def test_wrong_shapes_are_refused(documents, shape, message):
    with pytest.raises(ValueError, match=message):
        LongRangeEncoder(**TINY, documents=documents)(tokens(*shape))


def test_it_is_the_protocols_model():
    """64 wide, two layers, two heads of 32, MLP 128; without embeddings it has the published number of parameters."""
    model = LongRangeEncoder(vocabulary=512, max_length=4096, classes=2, attention="softmax")
    per_block = 4 * (64 * 64 + 64) + (64 * 128 + 128) + (128 * 64 + 64) + 4 * 64
    head = (64 * 128 + 128) + (128 * 2 + 2)
    assert sum(p.numel() for p in model.parameters()) == (512 + 4096) * 64 + 2 * per_block + 2 * 64 + head
