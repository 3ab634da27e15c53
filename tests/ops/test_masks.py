"""Promise 2: padding has no say, samples do not meet, order of tokens and pivots does not matter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lotformer
from support.problems import Inputs, lengths_mask, make_inputs, random_masses

SOLVERS = ["sinkhorn", "newton"]
SIDES = ["right", "left", "both"]


def grads_of(x: Inputs, **options) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Output and the gradients of all inputs under a fixed random cotangent on real rows."""
    leaves = Inputs(*(t.detach().clone().requires_grad_() for t in x))
    out = lotformer.lot_attention(*leaves, **options)
    torch.manual_seed(1)
    cotangent = torch.randn(out.shape, dtype=out.dtype)
    return out.detach(), list(torch.autograd.grad(out, leaves, cotangent))


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("side", SIDES)
def test_masked_equals_truncated_in_values_and_gradients(solver, side):
    n, m, lengths_n, lengths_m = 12, 17, [12, 7, 1], [5, 17, 3]
    x = make_inputs(3, 2, n, m)
    query_mask, key_mask = lengths_mask(lengths_n, n, side), lengths_mask(lengths_m, m, side)
    out, grads = grads_of(x, eps=0.2, solver=solver, tol=1e-12, query_mask=query_mask, key_mask=key_mask)
    torch.manual_seed(1)
    cotangent = torch.randn(out.shape, dtype=out.dtype)
    pivots_grad = torch.zeros_like(x.pivots)
    for b in range(3):
        rows, cols = query_mask[b], key_mask[b]
        leaves = [t.clone().requires_grad_() for t in (x.q[b : b + 1, :, rows], x.k[b : b + 1, :, cols],
                  x.v[b : b + 1, :, cols], x.pivots, x.log_masses)]  # fmt: skip
        alone = lotformer.lot_attention(*leaves, eps=0.2, solver=solver, tol=1e-12)
        torch.testing.assert_close(out[b : b + 1, :, rows], alone)
        assert (out[b, :, ~rows] == 0).all()
        dq, dk, dv, dz, _ = torch.autograd.grad(alone, leaves, cotangent[b : b + 1, :, rows])
        torch.testing.assert_close(grads[0][b : b + 1, :, rows], dq)
        torch.testing.assert_close(grads[1][b : b + 1, :, cols], dk)
        torch.testing.assert_close(grads[2][b : b + 1, :, cols], dv)
        for grad, real in ((grads[0], rows), (grads[1], cols), (grads[2], cols)):
            assert (grad[b, :, ~real] == 0).all()
        pivots_grad += dz
    torch.testing.assert_close(grads[3], pivots_grad)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf"), 1e30], ids=str)
def test_contents_of_padding_never_matter(solver, garbage):
    x = make_inputs(2, 2, 9, 11)
    query_mask, key_mask = lengths_mask([9, 4], 9), lengths_mask([6, 11], 11)
    masses = random_masses(2, 11, mask=key_mask)
    options = {"eps": 0.3, "solver": solver, "query_mask": query_mask, "key_mask": key_mask}
    dirty = Inputs(*(t.clone() for t in x))
    dirty.q.transpose(1, 2)[~query_mask] = garbage
    dirty.k.transpose(1, 2)[~key_mask] = garbage
    dirty.v.transpose(1, 2)[~key_mask] = garbage
    dirty_masses = masses.masked_fill(~key_mask, garbage)
    clean_out, clean_grads = grads_of(x, key_masses=masses, **options)
    dirty_out, dirty_grads = grads_of(dirty, key_masses=dirty_masses, **options)
    torch.testing.assert_close(dirty_out, clean_out, rtol=0, atol=0)
    for got, expected in zip(dirty_grads, clean_grads, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("empty", ["queries", "keys", "both"])
def test_an_all_padding_sample_gives_zeros_and_finite_gradients(solver, empty):
    x = make_inputs(2, 2, 7, 7)
    some, none = lengths_mask([7, 5], 7), lengths_mask([7, 0], 7)
    query_mask = none if empty in ("queries", "both") else some
    key_mask = none if empty in ("keys", "both") else some
    out, grads = grads_of(x, eps=0.1, solver=solver, query_mask=query_mask, key_mask=key_mask)
    assert (out[1] == 0).all()
    assert (out[0] != 0).any()
    assert all(g.isfinite().all() for g in grads)
    alone, _ = grads_of(Inputs(*(t[:1] for t in x[:3]), *x[3:]), eps=0.1, solver=solver)
    torch.testing.assert_close(out[:1], alone)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("masses", ["uniform", "shared", "per-head"])
def test_a_batch_of_zero_and_a_sequence_of_zero_pass_through(solver, dtype, masses):
    for batch, n, m in ((0, 5, 5), (2, 0, 5), (2, 5, 0)):
        x = make_inputs(batch, 2, n, m, dtype=dtype, requires_grad=True)
        shape = (batch, 2, m) if masses == "per-head" else (batch, m)
        key_masses = None if masses == "uniform" else torch.ones(shape, dtype=dtype) / max(m, 1)
        out = lotformer.lot_attention(*x, solver=solver, key_masses=key_masses)
        assert out.shape == (batch, 2, n, 8)
        assert (out == 0).all()
        out.sum().backward()
        plan = lotformer.coupling(*x.without_values, solver=solver, key_masses=key_masses)
        assert plan.residual().shape == plan.doubly_stochastic_error().shape == (batch, 2)


def test_without_keys_nothing_is_received_whatever_the_queries_hold():
    x = make_inputs(2, 2, 5, 0)
    assert (lotformer.lot_attention(x.q * torch.nan, *x[1:]) == 0).all()


@pytest.mark.parametrize("solver", SOLVERS)
def test_batched_equals_one_by_one(solver):
    x = make_inputs(4, 2, 13, 10)
    # one sample is much harder than the others: it must not change how they are solved
    x.q[2] *= 30
    x.k[2] *= 30
    together = lotformer.lot_attention(*x, eps=0.1, solver=solver, tol=1e-9)
    for b in range(4):
        alone = lotformer.lot_attention(*(t[b : b + 1] for t in x[:3]), *x[3:], eps=0.1, solver=solver, tol=1e-9)
        torch.testing.assert_close(together[b : b + 1], alone, rtol=1e-7, atol=1e-8)


@given(
    n=st.integers(1, 20),
    m=st.integers(1, 20),
    rank=st.integers(1, 24),
    solver=st.sampled_from(SOLVERS),
    seed=st.integers(0, 99),
)
def test_permuting_tokens_permutes_results_and_permuting_pivots_changes_nothing(n, m, rank, solver, seed):
    torch.manual_seed(seed)
    x = make_inputs(1, 2, n, m, rank)
    rows, cols, pivots = (torch.randperm(size) for size in (n, m, rank))
    options = {"eps": 0.2, "solver": solver, "tol": 1e-10}
    out = lotformer.lot_attention(*x, **options)
    moved = lotformer.lot_attention(
        x.q[:, :, rows], x.k[:, :, cols], x.v[:, :, cols], x.pivots[:, pivots], x.log_masses[:, pivots], **options
    )
    torch.testing.assert_close(moved, out[:, :, rows], rtol=1e-6, atol=1e-8)


@given(data=st.data(), solver=st.sampled_from(SOLVERS))
def test_any_pattern_of_padding_equals_removing_the_padded_tokens(data, solver):
    n = data.draw(st.integers(1, 16))
    pattern = data.draw(st.lists(st.booleans(), min_size=n, max_size=n).filter(any))
    x = make_inputs(1, 2, n)
    mask = torch.tensor([pattern])
    masked = lotformer.lot_attention(*x, eps=0.3, solver=solver, tol=1e-10, query_mask=mask, key_mask=mask)
    kept = mask[0]
    removed = lotformer.lot_attention(*(t[:, :, kept] for t in x[:3]), *x[3:], eps=0.3, solver=solver, tol=1e-10)
    torch.testing.assert_close(masked[:, :, kept], removed, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_key_of_zero_mass_is_like_padding(solver):
    x = make_inputs(1, 2, 6, 6)
    mask = lengths_mask([4], 6)
    masses = mask.double() / 4
    by_mass = lotformer.lot_attention(*x, solver=solver, key_masses=masses)
    by_mask = lotformer.lot_attention(*x, solver=solver, key_mask=mask)
    torch.testing.assert_close(by_mass, by_mask)
