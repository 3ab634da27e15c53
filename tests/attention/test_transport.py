"""Sinkformer and ESPFormer are doubly stochastic as their definitions say, written densely."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lotformer import attention
from lotformer.attention.espformer import ESPFormer
from lotformer.attention.espformer_hard import _partners
from support.dense import B, D, H, build, close, softmax_matrix, tokens


def test_sinkformer_with_one_half_step_is_softmax() -> None:
    q, k, v = tokens(7, 9)
    close(build("sinkformer", half_steps=1)(q, k, v), softmax_matrix(q, k) @ v)


@pytest.mark.parametrize("half_steps", [2, 3, 6, 7])
def test_sinkformer_alternates_row_and_column_normalisations(half_steps: int) -> None:
    q, k, v = tokens(7, 9)
    a = (q @ k.mT * D**-0.5).exp()
    for step in range(half_steps):
        a = a / a.sum(-1, keepdim=True) if step % 2 == 0 else a / a.sum(-2, keepdim=True) * (7 / 9)
    close(build("sinkformer", half_steps=half_steps)(q, k, v), a @ v)


def test_sinkformer_with_many_half_steps_is_doubly_stochastic() -> None:
    q, k, _ = tokens(11)
    found = attention.diagnose(build("sinkformer", half_steps=201), q, k)
    close(found.row_sums, torch.ones_like(found.row_sums), 1e-9)
    close(found.column_sums, torch.ones_like(found.column_sums), 1e-9)


# ESPFormer


def dense_esp(q: Tensor, k: Tensor, *, temperature: float, tau: float | None, slice_cost: str = "squared") -> Tensor:
    """The definition slice by slice; `tau=None` sorts truly."""
    x, y = q * D**-0.5, k * D**-0.5
    distance = (x[..., :, None, :] - y[..., None, :, :]).square().sum(-1)
    distance = distance / q.shape[2] if slice_cost == "squared" else distance.sqrt()

    def permutation(column: Tensor) -> Tensor:
        if tau is None:
            return F.one_hot(column.argsort(-1, descending=True), column.shape[-1]).to(column.dtype)
        ordered = column.sort(-1, descending=True).values
        return (-(ordered[..., :, None] - column[..., None, :]).square() / tau).softmax(-1)

    plans = torch.stack([permutation(x[..., l]).mT @ permutation(y[..., l]) for l in range(D)], 2)
    costs = (distance[:, :, None] * plans).sum((-1, -2))
    weights = (-temperature * costs).softmax(-1)
    return (weights[..., None, None] * plans).sum(2)


@pytest.mark.parametrize("slice_cost", ["squared", "distance"])
@pytest.mark.parametrize("temperature", [0.0, 0.1, 3.0])
@pytest.mark.parametrize(("name", "tau"), [("espformer", 0.05), ("espformer-hard", None)])
def test_espformer_and_its_gradients_are_the_weighted_mean_of_slices(
    name: str, tau: float | None, temperature: float, slice_cost: str
) -> None:
    options = {"temperature": temperature, "slice_cost": slice_cost} | ({} if tau is None else {"tau": tau})
    leaves = [x.requires_grad_() for x in tokens(9)]
    q, k, v = leaves
    out, dense = (
        build(name, **options)(q, k, v),
        dense_esp(q, k, temperature=temperature, tau=tau, slice_cost=slice_cost) @ v,
    )
    close(out, dense)
    upstream = torch.randn(out.shape, dtype=out.dtype)
    got, expected = (torch.autograd.grad(x, leaves, upstream, materialize_grads=True) for x in (out, dense))
    for x, y in zip(got, expected, strict=True):
        close(x, y)


@pytest.mark.parametrize("slice_cost", ["squared", "distance"])
@pytest.mark.parametrize(("n", "dim"), [(16, 8), (64, 8), (16, 64), (150, 32)])
def test_by_default_espformers_slices_are_told_apart_at_every_size(n: int, dim: int, slice_cost: str) -> None:
    """Weights that are all alike would teach queries and keys nothing; one slice alone would forget the others."""
    q, k = torch.randn(2, 2, 4, n, dim)
    module = attention.build("espformer-hard", head_dim=dim, num_heads=4, slice_cost=slice_cost)
    weights = module._slice_weights(q, k, _partners(q, k, None), None)
    assert 0.5 < weights.log().std(-1).mean() < 1.5


def test_soft_espformer_converges_to_the_hard_one_as_tau_vanishes() -> None:
    q, k, v = tokens(9)
    hard = build("espformer-hard", temperature=0.1)(q, k, v)
    errors = [
        (build("espformer", tau=tau, temperature=0.1)(q, k, v) - hard).abs().max() for tau in (1.0, 1e-2, 1e-4, 1e-12)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-12


def test_hard_espformer_is_exactly_doubly_stochastic() -> None:
    q, k, _ = tokens(13)
    found = attention.diagnose(build("espformer-hard"), q, k)
    close(found.row_sums, torch.ones_like(found.row_sums), 1e-14)
    close(found.column_sums, torch.ones_like(found.column_sums), 1e-14)


@pytest.mark.parametrize("name", ["espformer", "espformer-hard"])
def test_groups_of_slices_change_neither_output_nor_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = module(*leaves)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    q, k, v = tokens(7)
    module = build(name, temperature=1.0)
    whole = run()
    owner = __import__(type(module).__module__, fromlist=["GROUP_ELEMENTS"])
    monkeypatch.setattr(owner, "GROUP_ELEMENTS", 2 * B * H * 7 * 7)
    for got, expected in zip(run(), whole, strict=True):
        close(got, expected)


def test_espformer_holds_no_gradient_of_all_slices_at_once() -> None:
    """A group is recomputed in the backward pass: its soft permutations are not kept."""
    q, k, v = (x.requires_grad_() for x in tokens(40))
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        attention.build("espformer", head_dim=D, num_heads=H).double()(q, k, v)
    whole = sum(kept)
    kept.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ESPFormer.__module__ + ".GROUP_ELEMENTS", 1)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
            attention.build("espformer", head_dim=D, num_heads=H).double()(q, k, v)
    assert sum(kept) < whole / 2
