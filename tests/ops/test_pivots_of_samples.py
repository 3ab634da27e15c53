"""Pivots of a sample's own: every backend takes them, and pooling makes them from the keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lotformer
from lotformer.nn import PivotPooling
from support.cpu_kernel import FORMS, needs_kernel
from support.problems import lengths_mask, random_masses

BACKENDS = ["reference", pytest.param("cpu", marks=needs_kernel)]


def call(backend: str, dtype: torch.dtype, masses: bool, **options) -> list[Tensor]:
    """Output and gradients on three samples, two heads, and pivots that differ from sample to sample."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x = {"q": normal(3, 2, 12, 8), "k": normal(3, 2, 17, 8), "v": normal(3, 2, 17, 6), "pivots": normal(3, 2, 5, 8)}
    x |= {"log_masses": normal(2, 5).log_softmax(-1), "eps": torch.tensor([0.4, 0.7])}
    if masses:
        for name, a in (("query", normal(3, 12).exp()), ("key", normal(3, 2, 17).exp())):
            mask = options.get(f"{name}_mask")
            a = a if mask is None else a * (mask if a.dim() == 2 else mask[:, None])
            x[f"{name}_masses"] = a / a.sum(-1, keepdim=True).clamp_min(1e-9)
    leaves = {name: t.to(dtype).requires_grad_() for name, t in x.items()}
    out = lotformer.lot_attention(**leaves, backend=backend, **options)
    cotangent = normal(*out.shape).to(dtype)
    grads = torch.autograd.grad(out, list(leaves.values()), cotangent, allow_unused=True, materialize_grads=True)
    return [out.detach(), *grads]


MASKS = {
    "all": {},
    "queries": {"query_mask": lengths_mask([12, 7, 1], 12)},
    "keys": {"key_mask": lengths_mask([5, 17, 3], 17, "left")},
    "an empty sample": {"query_mask": lengths_mask([12, 0, 4], 12), "key_mask": lengths_mask([5, 17, 0], 17)},
}


@needs_kernel
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("masses", [False, True], ids=["uniform", "masses"])
@pytest.mark.parametrize("masks", MASKS)
def test_the_kernel_agrees_with_the_reference(masks, masses, form):
    options = {"masses": masses, **FORMS[form], **MASKS[masks]}
    results = call("cpu", torch.float32, **options), call("reference", torch.float64, **options)
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_sample_is_attended_with_its_own(backend, form):
    q, k, v = torch.randn(3, 3, 2, 9, 8).unbind(0)
    pivots, log_masses = torch.randn(3, 2, 5, 8), torch.randn(2, 5).log_softmax(-1)
    masses = random_masses(3, 2, 9)
    options = {**FORMS[form], "backend": backend, "eps": 0.5}
    together = lotformer.lot_attention(q, k, v, pivots, log_masses, key_masses=masses.float(), **options)
    for b in range(3):
        one = slice(b, b + 1)
        alone = lotformer.lot_attention(
            q[one], k[one], v[one], pivots[b], log_masses, key_masses=masses[one].float(), **options
        )
        torch.testing.assert_close(together[one], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_padding_holds_does_not_matter(backend):
    q, k, v = torch.randn(3, 2, 2, 9, 8).unbind(0)
    pivots, log_masses = torch.randn(2, 2, 5, 8), torch.randn(2, 5).log_softmax(-1)
    options = {"backend": backend, "query_mask": lengths_mask([9, 4], 9), "key_mask": lengths_mask([9, 4], 9)}
    clean = lotformer.lot_attention(q, k, v, pivots, log_masses, **options)
    for x in (q, k, v):
        x[1, :, 4:] = float("nan")
    assert torch.equal(lotformer.lot_attention(q, k, v, pivots, log_masses, **options), clean)
    assert (clean[1, :, 4:] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_without_samples_has_gradients_of_zero(backend):
    q, pivots = torch.randn(0, 2, 5, 8, requires_grad=True), torch.randn(0, 2, 3, 8, requires_grad=True)
    log_masses = torch.zeros(2, 3).log_softmax(-1).requires_grad_()
    out = lotformer.lot_attention(q, q, q, pivots, log_masses, backend=backend)
    grads = torch.autograd.grad(out.sum(), (q, pivots, log_masses))
    assert out.shape == (0, 2, 5, 8)
    assert grads[1].shape == pivots.shape
    assert (grads[2] == 0).all()


def test_pooling_follows_its_formula_over_real_keys():
    pooling = PivotPooling(2, 3, 4, pull=0.3)
    k, mask = torch.randn(2, 2, 7, 4), lengths_mask([7, 3], 7, "left")
    got = pooling(k.transpose(1, 2).masked_fill(~mask[..., None, None], float("nan")).transpose(1, 2), mask)
    for b in range(2):
        for h in range(2):
            real = k[b, h, mask[b]]
            torch.testing.assert_close(got[b, h], 0.3 * (pooling.directions.bias[h] @ real.T).softmax(-1) @ real)
    assert (pooling(k, lengths_mask([7, 0], 7))[1] == 0).all()
    assert pooling(k[:, :, :0]).shape == (2, 2, 3, 4)


@pytest.mark.parametrize("key_masses", ["uniform", "query-aware"])
def test_an_input_aware_mechanism_keeps_the_promises(key_masses):
    mechanism = lotformer.attention.build(
        "lot", head_dim=8, num_heads=3, rank=4, eps=0.3, solver="newton", pivots="input-aware", key_masses=key_masses
    )
    q, k, v = torch.randn(3, 2, 3, 12, 8).unbind(0)
    mask = lengths_mask([12, 7], 12)
    out, plan = mechanism(q, k, v, mask, mask), mechanism.coupling(q, k, mask, mask)
    assert plan.residual().max() < 1e-5
    torch.testing.assert_close(out, plan.apply(v), rtol=1e-4, atol=1e-5)
    if key_masses == "uniform":
        assert plan.doubly_stochastic_error().max() < 1e-5
    short = mechanism(*(x[1:, :, :7] for x in (q, k, v)))
    torch.testing.assert_close(out[1:, :, :7], short, rtol=1e-4, atol=1e-5)
    order = torch.randperm(12)
    permuted = mechanism(*(x[:1, :, order] for x in (q, k, v)))
    torch.testing.assert_close(permuted, out[:1, :, order], rtol=1e-4, atol=1e-5)


def test_input_aware_pivots_learn_faster_than_fixed_ones_to_find_the_same_token():
    def error(pivots: str) -> float:
        """After a little training: tokens come twice, one of the two knows something, both are asked for it."""
        torch.manual_seed(0)
        mechanism = lotformer.attention.build(
            "lot", head_dim=8, num_heads=1, rank=8, eps=0.1, solver="newton", pivots=pivots, pivot_init="small"
        )
        optimizer = torch.optim.Adam(mechanism.parameters(), lr=2e-2)
        losses = []
        for _ in range(120):
            words = 10 * torch.nn.functional.normalize(torch.randn(16, 1, 4, 8), dim=-1)
            known = torch.randn(16, 1, 4, 3)
            words, values = torch.cat([words, words], 2), torch.cat([known, torch.zeros_like(known)], 2)
            loss = (2 * mechanism(words, words, values) - torch.cat([known, known], 2)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return sum(losses[-20:]) / 20

    assert error("input-aware") < 0.5 * error("fixed")


def test_a_misspelt_kind_of_pivots_is_refused():
    with pytest.raises(ValueError, match="pivots must be one of 'fixed', 'input-aware', 'found', got 'aware'"):
        lotformer.LOTAttention(16, 2, rank=4, pivots="aware")
