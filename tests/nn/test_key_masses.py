"""Masses that are learned from the keys: the extension computes what the plain formula says."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lotformer.nn.key_masses import KeyMasses
from support.cpu_kernel import needs_kernel

KINDS = ("linear", "query-aware")


def learned(heads: int, dim: int, kind: str) -> KeyMasses:
    made = KeyMasses(heads, dim, kind)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


def tokens(batch: int, heads: int, length: int, dim: int, layout: str) -> torch.Tensor:
    shape = {"heads first": (batch, heads, length, dim), "tokens first": (batch, length, heads, dim)}
    if layout == "columns":
        return torch.randn(batch, heads, dim, length).mT
    x = torch.randn(*shape[layout])
    return x if layout == "heads first" else x.transpose(1, 2)


@needs_kernel
@settings(deadline=None, max_examples=60)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 70), st.integers(1, 70), st.integers(1, 40)),
    kind=st.sampled_from(KINDS),
    layout=st.sampled_from(["heads first", "tokens first", "columns"]),
    masked=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_extension_agrees_with_the_formula_in_double(shape, kind, layout, masked, seed):
    torch.manual_seed(seed)
    batch, heads, n, m, dim = shape
    module = learned(heads, dim, kind)
    q, k = tokens(batch, heads, n, dim, layout), tokens(batch, heads, m, dim, layout)
    masks = (torch.rand(batch, m) < 0.7, torch.rand(batch, n) < 0.7) if masked else (None, None)
    upstream = torch.randn(batch, heads, m)

    def outcome(module, dtype):
        inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k)]
        masses = module(*inputs, *masks)
        wanted = [x for x in (*inputs, *module.parameters()) if kind == "query-aware" or x is not inputs[0]]
        return [masses, *torch.autograd.grad(masses, wanted, upstream.to(dtype))]

    for got, expected in zip(
        outcome(module, torch.float32), outcome(copy.deepcopy(module).double(), torch.float64), strict=True
    ):
        scale = expected.abs().max().clamp_min(1e-3)
        assert ((got - expected).abs().max() / scale).item() < 2e-5


@needs_kernel
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_in_padding_does_not_matter(kind):
    torch.manual_seed(0)
    module, q, k = learned(2, 8, kind), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    mask = torch.arange(9)[None] < torch.tensor([[6], [9]])
    expected = module(q[:1, :, :6], k[:1, :, :6])
    for x in (q, k):
        x[0, :, 6:] = float("nan")
        x.requires_grad_()
    masses = module(q, k, mask, mask)
    assert torch.equal(masses[:1, :, :6], expected)
    assert (masses[0, :, 6:] == 0).all()
    masses.square().sum().backward()
    for x in (q, k, *module.parameters()):
        assert x.grad is None or x.grad.isfinite().all()


@needs_kernel
@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_of_padding_alone_stays_finite_and_a_sample_does_not_depend_on_its_batch(kind):
    torch.manual_seed(0)
    module, q, k = learned(3, 5, kind), torch.randn(4, 3, 7, 5), torch.randn(4, 3, 11, 5)
    mask = torch.ones(4, 11, dtype=torch.bool)
    mask[2] = False
    masses = module(q, k, mask)
    assert masses.isfinite().all()
    assert torch.equal(masses[1:2], module(q[1:2], k[1:2], mask[1:2]))


@needs_kernel
def test_what_is_not_a_number_is_seen():
    module, k = learned(1, 4, "linear"), torch.randn(1, 1, 6, 4)
    k[0, 0, 2, 1] = float("nan")
    assert module(k, k).isnan().any()


def test_a_compiled_module_says_the_same():
    module, q, k = learned(2, 8, "query-aware"), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    torch.testing.assert_close(torch.compile(module, fullgraph=True)(q, k), module(q, k))
