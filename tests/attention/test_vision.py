"""Blocks of vision models, with their convolutions and positions, agree with their definitions."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lotformer.attention import attention_matrix
from lotformer.nn.depthwise import DepthwiseMixing
from support.dense import D, H, build, close, normalized, tokens


def convolved(v: Tensor, filters: Tensor, grid: tuple[int, int]) -> Tensor:
    """A depthwise convolution of each head's value map, by shifts; filters `(H or 1, D, s, s)`."""
    side = filters.shape[-1]
    pad = side // 2
    image = F.pad(v.mT.unflatten(-1, grid), (pad, pad, pad, pad))
    total = torch.zeros_like(v.mT.unflatten(-1, grid))
    for a in range(side):
        for b in range(side):
            total = total + filters[..., a, b, None, None] * image[..., a : a + grid[0], b : b + grid[1]]
    return total.flatten(-2).mT


def test_angular_attention_normalises_the_linear_terms_and_adds_a_convolution() -> None:
    q, k, v = tokens(7)
    module = build("angular")
    q_unit, k_unit = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    mixed = (0.5 * torch.eye(7, dtype=torch.float64) + q_unit @ k_unit.mT / math.pi) @ v
    padded = F.pad(v, (0, 0, 4, 4))
    local = sum(module.local.conv.weight[:, 0, t, None, None] * padded[:, :, t : t + 7] for t in range(9))
    close(module(q, k, v), mixed / mixed.norm(dim=-1, keepdim=True) + local)


def focused(x: Tensor, scale: Tensor, power: float) -> Tensor:
    flat = ((F.relu(x) + 1e-6) / F.softplus(scale)).transpose(1, 2).flatten(2)
    sharp = flat**power
    sharp = flat.norm(dim=-1, keepdim=True) * sharp / sharp.norm(dim=-1, keepdim=True)
    return sharp.unflatten(2, (H, D)).transpose(1, 2)


def test_focused_attention_is_its_kernel_plus_a_convolution_shared_by_heads() -> None:
    q, k, v = tokens(12)
    module = build("flatten", num_tokens=12)
    torch.nn.init.normal_(module.channel_scale.scale)
    torch.nn.init.normal_(module.positions.table)
    phi_q = focused(q, module.channel_scale.scale, 3)
    phi_k = focused(k + module.positions.table, module.channel_scale.scale, 3)
    weights = phi_q @ phi_k.mT
    expected = weights / 12 / (weights.mean(-1, keepdim=True) + 1e-6) @ v
    expected = expected + convolved(v, module.local.conv.weight[None, :, 0], (3, 4))
    close(module(q, k, v, grid=(3, 4)), expected)


def test_focused_attention_without_convolution_is_a_matrix_and_crosses() -> None:
    q, k, v = tokens(7, 9)
    module = build("flatten", local_conv=False)
    close(attention_matrix(module, q, k) @ v, module(q, k, v))


def test_enhanced_attention_is_the_relu_kernel_plus_a_convolution() -> None:
    q, k, v = tokens(12)
    module = build("enhanced")
    filters = module.local.conv.weight[:, 0].unflatten(0, (H, D))
    expected = normalized(F.relu(q) @ F.relu(k).mT, 1e-15) @ v + convolved(v, filters, (3, 4))
    close(module(q, k, v, grid=(3, 4)), expected)


def test_polaformer_mixes_halves_of_the_values_by_like_and_opposite_signs() -> None:
    q, k, v = tokens(12)
    module = build("polaformer", num_tokens=16)
    for parameter in (module.power, module.channel_scale.scale, module.positions.table):
        torch.nn.init.normal_(parameter)
    power = 1 + 4 * module.power.sigmoid()
    x = q / F.softplus(module.channel_scale.scale)
    y = (k + module.positions.table[:, :12]) / F.softplus(module.channel_scale.scale)
    (qp, qn), (kp, kn) = ((F.relu(t) ** power, F.relu(-t) ** power) for t in (x, y))
    like, opposite = qp @ kp.mT + qn @ kn.mT, qn @ kp.mT + qp @ kn.mT
    halves = [
        weights / 12 / (weights.mean(-1, keepdim=True) + 1e-6) @ part
        for weights, part in ((like, v[..., : D // 2]), (opposite, v[..., D // 2 :]))
    ]
    mixed = torch.cat(halves, -1) + convolved(v, module.local.conv.weight[None, :, 0], (3, 4))
    gate = q @ module.gate.weight + module.gate.bias
    close(module(q, k, v, grid=(3, 4)), mixed * gate)


def test_polaformer_starts_with_powers_of_three() -> None:
    q, k, v = tokens(9)
    fixed = build("polaformer", gate=False, local_conv=False)
    (qp, qn), (kp, kn) = ((F.relu(t / math.log(2)) ** 3, F.relu(-t / math.log(2)) ** 3) for t in (q, k))
    like, opposite = qp @ kp.mT + qn @ kn.mT, qn @ kp.mT + qp @ kn.mT
    expected = [normalized(w, 9e-6) @ part for w, part in zip((like, opposite), v.tensor_split(2, -1), strict=True)]
    close(fixed(q, k, v), torch.cat(expected, -1))


@pytest.mark.parametrize("name", ["flatten", "enhanced", "polaformer"])
def test_blocks_with_a_2d_part_say_when_tokens_are_no_grid(name: str) -> None:
    q, k, v = tokens(7)
    with pytest.raises(ValueError, match="7 tokens do not form a square"):
        build(name)(q, k, v)
    assert build(name, local_conv=False)(q, k, v).shape == q.shape


@pytest.mark.parametrize("name", ["flatten", "polaformer"])
def test_positions_say_when_there_are_more_tokens_than_they_were_made_for(name: str) -> None:
    q, k, v = tokens(9)
    with pytest.raises(ValueError, match=r"at most 8 tokens, got 9.*num_tokens"):
        build(name, num_tokens=8)(q, k, v)


@pytest.mark.parametrize("name", ["flatten", "polaformer"])
def test_positions_of_a_grid_are_resampled_for_grids_of_other_shapes(name: str) -> None:
    module = build(name, num_tokens=(2, 3))
    ramp = torch.arange(3.0).repeat(2)[:, None].expand(6, D)  # grows from left to right
    with torch.no_grad():
        module.positions.table.copy_(ramp.expand(H, 6, D))
    q, k, v = tokens(24)
    added = module.positions(torch.zeros_like(k), (4, 6)).unflatten(2, (4, 6))
    assert (added.diff(dim=3) > 0).all()
    close(added, added[:, :, :1].expand_as(added))
    close(module.positions(torch.zeros_like(k[:1, :, :6]), (2, 3)), module.positions.table[None])
    close(module.positions(torch.zeros_like(k[:1, :, :6])), module.positions.table[None])
    assert module(q, k, v, grid=(4, 6)).isfinite().all()


def test_depthwise_mixing_names_values_of_the_wrong_width() -> None:
    with pytest.raises(ValueError, match="values must have the dimension of the heads"):
        DepthwiseMixing(8, "1d", sharing="heads")(torch.randn(1, 2, 5, 7))
