"""Mechanisms with a feature map are their kernel, written as an n×n matrix."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lotformer import attention
from support.dense import B, D, H, build, close, normalized, softmax_matrix, tokens

# Kernels with a feature map: the n×n matrix is φ(q) φ(k)ᵀ with normalised rows


def test_linear_transformer_is_its_kernel() -> None:
    q, k, v = tokens(7, 9)
    weights = (F.elu(q) + 1) @ (F.elu(k) + 1).mT
    close(build("linear-transformer")(q, k, v), normalized(weights, 1e-6) @ v)


def test_performer_is_its_kernel_with_no_bias_from_stabilisation() -> None:
    q, k, v = tokens(7, 9, scale=3.0)
    module = build("performer", features=17)

    def phi(x: Tensor) -> Tensor:
        x = x * D**-0.25
        return (x @ module.projection.mT - x.square().sum(-1, keepdim=True) / 2).exp()

    close(module(q, k, v), normalized(phi(q) @ phi(k).mT) @ v)


def test_performer_converges_to_softmax_as_features_grow() -> None:
    q, k, v = tokens(7, 9, scale=0.7)
    exact = softmax_matrix(q, k) @ v
    few, many, most = (
        (build("performer", features=features)(q, k, v) - exact).square().mean().sqrt()
        for features in (1 << 6, 1 << 11, 1 << 16)
    )
    assert most < many < few
    assert most < few / 8  # a Monte Carlo rate would be a factor of 32
    assert most < 0.02


def test_performer_draws_orthogonal_blocks_of_gaussian_length_and_redraws() -> None:
    module = attention.build("performer", head_dim=16, num_heads=1, features=4096)
    gram = module.projection[:16] @ module.projection[:16].mT
    assert (gram - gram.diag().diag()).abs().max() < 1e-4
    assert abs(module.projection.square().sum(-1).mean() - 16) < 0.5
    assert module.projection.mean(0).abs().max() < 0.1  # a leaning basis would bias the kernel
    before = module.projection.clone()
    module.redraw(torch.Generator().manual_seed(1))
    assert not torch.equal(before, module.projection)
    again = module.projection.clone()
    module.redraw(torch.Generator().manual_seed(1))
    assert torch.equal(again, module.projection)


@pytest.mark.parametrize("name", ["performer", "hedgehog"])
def test_exponential_features_survive_scores_of_thousands(name: str) -> None:
    q, k, v = (x.float().requires_grad_() for x in tokens(7, scale=300.0))
    out = attention.build(name, head_dim=D, num_heads=H)(q, k, v)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    assert out.amax() <= v.amax() + 1e-5
    assert out.amin() >= v.amin() - 1e-5


def test_cosformer_weighs_the_relu_kernel_by_the_cosine_of_the_distance() -> None:
    q, k, v = tokens(7, 9)
    i, j = torch.arange(7, dtype=torch.float64), torch.arange(9, dtype=torch.float64)
    weights = (F.relu(q) @ F.relu(k).mT) * torch.cos(math.pi / 2 * (i[:, None] - j) / 9)
    close(build("cosformer")(q, k, v), normalized(weights, 1e-6) @ v)


@pytest.mark.parametrize("tied", [False, True])
def test_hedgehog_is_its_exponential_kernel(tied: bool) -> None:
    q, k, v = tokens(7, 9)
    module = build("hedgehog", tied=tied)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    key_map = module.query_map if tied else module.key_map
    x, y = (x @ layer.weight + layer.bias for x, layer in ((q, module.query_map), (k, key_map)))
    phi_q, phi_k = torch.cat([x.exp(), (-x).exp()], -1), torch.cat([y.exp(), (-y).exp()], -1)
    close(module(q, k, v), normalized(phi_q @ phi_k.mT) @ v)


def test_hedgehog_starts_as_the_identity_map() -> None:
    q, k, v = tokens(7, 9)
    weights = torch.cat([q.exp(), (-q).exp()], -1) @ torch.cat([k.exp(), (-k).exp()], -1).mT
    close(build("hedgehog")(q, k, v), normalized(weights) @ v)


def test_hedgehog_with_softmax_features_is_its_kernel() -> None:
    q, k, v = tokens(7, 9)
    phi_q, phi_k = (torch.cat([x.softmax(-1), (-x).softmax(-1)], -1) for x in (q, k))
    close(build("hedgehog", activation="softmax")(q, k, v), normalized(phi_q @ phi_k.mT) @ v)


@pytest.mark.parametrize("tied", [False, True])
def test_t2r_is_its_relu_kernel(tied: bool) -> None:
    q, k, v = tokens(7, 9)
    module = build("t2r", features=11, tied=tied)
    key_map = module.query_map if tied else module.key_map
    phi_q = F.relu(D**-0.5 * q @ module.query_map.weight + module.query_map.bias)
    phi_k = F.relu(k @ key_map.weight + key_map.bias)
    close(module(q, k, v), normalized(phi_q @ phi_k.mT) @ v)
    module.scale, module.floor = 1.0, 1e6
    phi_q = F.relu(q @ module.query_map.weight + module.query_map.bias)
    close(module(q, k, v), phi_q @ phi_k.mT @ v / 1e6)


def test_efficient_attention_is_a_row_stochastic_product_of_two_softmaxes() -> None:
    q, k, v = tokens(7, 9)
    matrix = q.softmax(-1) @ k.softmax(-2).mT
    close(matrix.sum(-1), torch.ones(B, H, 7, dtype=torch.float64))
    close(build("efficient")(q, k, v), matrix @ v)


def test_hydra_is_one_head_per_channel() -> None:
    q, k, v = tokens(7, 9)
    norms = [x.transpose(1, 2).flatten(2).norm(dim=-1)[:, None, :, None] for x in (q, k)]
    per_channel = torch.einsum("bhnd,bhmd->bhdnm", q / norms[0], k / norms[1])
    close(build("hydra")(q, k, v), torch.einsum("bhdnm,bhmd->bhnd", per_channel, v))


def test_mobiattention_is_flow_attention_over_heads() -> None:
    q, k, v = tokens(7)
    e = 1e-6
    s, t = q.sigmoid(), k.sigmoid()

    def flow(x: Tensor, y: Tensor) -> Tensor:
        return torch.einsum("bhnd,bnd->bhn", x + e, y.sum(1) + e)

    incoming, outgoing = 1 / flow(s, t), 1 / flow(t, s)
    sink = flow(s, t * outgoing[..., None])
    source = flow(t, s * incoming[..., None]).clamp(-1, 1)
    matrix = (s * incoming[..., None]) @ t.mT * (source.softmax(-1) * 7)[..., None, :]
    close(build("mobiattention")(q, k, v), sink.sigmoid()[..., None] * (matrix @ v))
