"""Attention dropout acts on every row alike, whichever way a row reads its keys."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import lotformer
from lotformer.attention import Attention
from support.problems import lengths_mask

N, D, P = 12, 16, 0.5
READ = {
    "transport": {},
    "exact": {"solver": "newton", "balance": "keys"},
    "prefix": {"prefix_tokens": 2},
    "polarised": {"prefix_tokens": 2, "polarize_prefix": True},
    "window": {"window": "1d", "window_size": 5, "prefix_tokens": 2},
    "grid": {"window": "2d", "pivots": "input-aware"},
    "all in the window": {"window": "1d", "window_size": 33},
}


def build(kind: str, dropout: float = P, backend: str | None = None) -> Attention:
    options = {"rank": 4, "key_masses": "query-aware", "backend": backend, **READ[kind]}
    return lotformer.attention.build("lot", head_dim=D, num_heads=2, dropout=dropout, **options)


def read(mechanism: Attention, batch: int = 3) -> Tensor:
    """The matrices `(B, 2, N, N)` that it applies: what it makes of one-hot values."""
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 1, 2, N, D, generator=generator)
    values = torch.eye(N, D).expand(batch, 2, N, D)
    return mechanism(q.expand_as(values), k.expand_as(values), values, grid=(3, 4))[..., :N]


def assert_keys_are_dropped(got: Tensor, whole: Tensor) -> None:
    """Whole columns of it, of every row, and the others stand for them."""
    kept = got.sum(-2) / whole.sum(-2)
    torch.testing.assert_close(kept, (kept > 0.1).float() / (1 - P), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got, whole * kept[:, :, None], rtol=1e-4, atol=1e-5)
    assert (got != whole).any(-1).all(), "a row that dropout leaves as it is"


@pytest.mark.parametrize("learning", [True, False], ids=["with-gradients", "without"])
@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("kind", READ)
def test_every_row_of_a_head_misses_the_same_keys(kind: str, backend: str | None, learning: bool) -> None:
    mechanism = build(kind, backend=backend)
    with torch.set_grad_enabled(learning):
        whole, got = read(mechanism.eval()).detach(), read(mechanism.train()).detach()
    assert_keys_are_dropped(got, whole)
    assert (got[0] != got[1]).any()
    assert (got[:, 0] != got[:, 1]).any()


@pytest.mark.parametrize("kind", READ)
def test_the_mean_over_draws_is_the_output_without_dropout(kind: str) -> None:
    mechanism = build(kind)
    with torch.no_grad():
        whole, draws = read(mechanism.eval(), 1)[0], read(mechanism.train(), 4000)
    error = (draws.mean(0) - whole).abs()
    assert (error <= 5 * draws.std(0) / len(draws) ** 0.5 + 1e-6).all()


@pytest.mark.parametrize("kind", READ)
def test_evaluation_and_a_probability_of_zero_drop_nothing(kind: str) -> None:
    dropping = build(kind)
    none = copy.deepcopy(dropping)
    none.config = replace(none.config, dropout=0.0)
    assert torch.equal(read(dropping.eval()), read(none.eval()))
    assert torch.equal(read(none.train()), read(none.eval()))


@pytest.mark.parametrize("kind", ["transport", "prefix", "polarised"])
def test_layers_that_form_no_queries_drop_the_same_keys(kind: str) -> None:
    layer = lotformer.LOTAttention(2 * D, 2, attn_drop=P, rank=4, local_conv="1d", **READ[kind]).double()
    twin, folded = copy.deepcopy(layer), copy.deepcopy(layer)
    twin.qkv.register_forward_hook(lambda *_: None)  # watched: forms them
    folded.fold()
    x, outs = torch.randn(2, N, 2 * D, dtype=torch.float64), []
    for candidate in (layer, twin, folded):
        torch.manual_seed(3)
        outs.append(candidate(x, mask=lengths_mask([N, 7], N)))
    torch.testing.assert_close(outs[1], outs[0])
    torch.testing.assert_close(outs[2], outs[0])
    assert ((layer.eval()(x, mask=lengths_mask([N, 7], N)) - outs[0]).abs().amax(-1)[0] > 1e-6).all()


@pytest.mark.parametrize("reentrant", [False, True], ids=["without-reentry", "reentrant"])
@pytest.mark.parametrize("kind", READ)
def test_recomputed_layers_drop_the_same_keys_again(kind: str, reentrant: bool) -> None:
    layer = lotformer.LOTAttention(2 * D, 2, attn_drop=P, rank=4, **READ[kind]).double()
    x, found = torch.randn(2, N, 2 * D, dtype=torch.float64, requires_grad=True), []
    for again in (False, True):
        torch.manual_seed(3)
        out = (
            checkpoint(lambda x: layer(x, grid=(3, 4)), x, use_reentrant=reentrant) if again else layer(x, grid=(3, 4))
        )
        gradients = torch.autograd.grad(out.square().sum(), [x]) if not reentrant else backward(out.square().sum(), x)
        found.append([out.detach(), *gradients])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


def backward(loss: Tensor, x: Tensor) -> list[Tensor]:
    """By `backward`, which is all that reentrant checkpointing knows."""
    x.grad = None
    loss.backward()
    assert x.grad is not None
    return [x.grad.clone()]


@pytest.mark.parametrize("kind", ["transport", "polarised", "window"])
def test_compiled_layers_drop_keys_of_every_row(kind: str) -> None:
    torch._dynamo.reset()
    mechanism = build(kind)
    whole = read(mechanism.eval()).detach()
    got = read(torch.compile(mechanism.train(), backend="aot_eager", fullgraph=True)).detach()
    assert_keys_are_dropped(got, whole)
