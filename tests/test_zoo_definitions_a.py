"""Kernel, low-rank and transport mechanisms agree with their definitions, written densely."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lotformer import attention
from lotformer.attention import attention_matrix
from lotformer.attention.base import Attention
from lotformer.attention.espformer import ESPFormer
from lotformer.attention.nystromformer import segment_means
from lotformer.nn.depthwise import DepthwiseMixing
from lotformer.nn.inverse import iterative_pseudo_inverse

B, H, D = 2, 3, 6


def tokens(n: int, m: int | None = None, *, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    m = n if m is None else m
    shapes = ((B, H, n, D), (B, H, m, D), (B, H, m, D))
    q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return q * scale, k * scale, v


def build(name: str, **options: object) -> Attention:
    return attention.build(name, head_dim=D, num_heads=H, **options).double()


def close(got: Tensor, expected: Tensor, tol: float = 1e-10) -> None:
    torch.testing.assert_close(got, expected, rtol=tol, atol=tol)


def normalized(weights: Tensor, eps: float = 0.0) -> Tensor:
    return weights / (weights.sum(-1, keepdim=True) + eps)


def softmax_matrix(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT * D**-0.5).softmax(-1)


def gaussian(x: Tensor, y: Tensor) -> Tensor:
    squares = (x[..., :, None, :] - y[..., None, :, :]).square().sum(-1)
    return (-squares / (2 * math.sqrt(D))).exp()


# Sinkformer


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


def dense_esp(q: Tensor, k: Tensor, *, temperature: float, tau: float | None) -> Tensor:
    """The definition slice by slice; `tau=None` sorts truly."""
    x, y = q * D**-0.5, k * D**-0.5
    distance = (x[..., :, None, :] - y[..., None, :, :]).square().sum(-1)

    def permutation(column: Tensor) -> Tensor:
        if tau is None:
            return F.one_hot(column.argsort(-1, descending=True), column.shape[-1]).to(column.dtype)
        ordered = column.sort(-1, descending=True).values
        return (-(ordered[..., :, None] - column[..., None, :]).square() / tau).softmax(-1)

    plans = torch.stack([permutation(x[..., l]).mT @ permutation(y[..., l]) for l in range(D)], 2)
    costs = (distance[:, :, None] * plans).sum((-1, -2)) / q.shape[2]
    weights = (-temperature * costs).softmax(-1)
    return (weights[..., None, None] * plans).sum(2)


@pytest.mark.parametrize("temperature", [0.0, 0.1, 3.0])
@pytest.mark.parametrize(("name", "tau"), [("espformer", 0.05), ("espformer-hard", None)])
def test_espformer_and_its_gradients_are_the_weighted_mean_of_slices(
    name: str, tau: float | None, temperature: float
) -> None:
    options = {"temperature": temperature} if tau is None else {"temperature": temperature, "tau": tau}
    leaves = [x.requires_grad_() for x in tokens(9)]
    q, k, v = leaves
    out, dense = build(name, **options)(q, k, v), dense_esp(q, k, temperature=temperature, tau=tau) @ v
    close(out, dense)
    upstream = torch.randn(out.shape, dtype=out.dtype)
    got, expected = (torch.autograd.grad(x, leaves, upstream, materialize_grads=True) for x in (out, dense))
    for x, y in zip(got, expected, strict=True):
        close(x, y)


def test_soft_espformer_converges_to_the_hard_one_as_tau_vanishes() -> None:
    q, k, v = tokens(9)
    hard = build("espformer-hard")(q, k, v)
    errors = [(build("espformer", tau=tau)(q, k, v) - hard).abs().max() for tau in (1.0, 1e-2, 1e-4, 1e-12)]
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
    phi_q = F.relu(q @ module.query_map.weight + module.query_map.bias)
    phi_k = F.relu(k @ key_map.weight + key_map.bias)
    close(module(q, k, v), normalized(phi_q @ phi_k.mT, 1e-6) @ v)


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


# Low rank


@pytest.mark.parametrize("share", [False, True])
def test_linformer_is_softmax_over_combined_keys(share: bool) -> None:
    q, k, v = tokens(7, 9)
    module = build("linformer", rank=4, max_length=10, share_key_value=share)
    to_keys = module.key_projection[..., :9]
    to_values = to_keys if share else module.value_projection[..., :9]
    close(module(q, k, v), softmax_matrix(q, to_keys @ k) @ to_values @ v)


def test_linformer_refuses_sequences_longer_than_it_was_built_for() -> None:
    q, k, v = tokens(5, 11)
    with pytest.raises(ValueError, match=r"at most 10 keys, got 11.*max_length"):
        build("linformer", max_length=10)(q, k, v)


def test_nystromformer_with_a_landmark_per_token_is_softmax() -> None:
    q, k, v = tokens(9)
    module = build("nystromformer", landmarks=9, inverse_iters=40, conv_kernel=None)
    close(module(q, k, v), softmax_matrix(q, k) @ v, 1e-7)


@pytest.mark.parametrize(("n", "m"), [(12, 8), (11, 7), (3, 11)], ids=["divisible", "odd", "fewer-than-landmarks"])
def test_nystromformer_rebuilds_softmax_from_segment_means(n: int, m: int) -> None:
    q, k, v = tokens(n, m)

    def landmarks(x: Tensor) -> Tensor:
        length = x.shape[2]
        segment = torch.arange(length) * min(4, length) // length
        return torch.stack([x[:, :, segment == s].mean(2) for s in range(min(4, length))], 2)

    q_land, k_land = landmarks(q), landmarks(k)
    inverse = torch.linalg.pinv(softmax_matrix(q_land, k_land))
    expected = softmax_matrix(q, k_land) @ inverse @ softmax_matrix(q_land, k) @ v
    close(build("nystromformer", landmarks=4, inverse_iters=40, conv_kernel=None)(q, k, v), expected, 1e-8)


def test_nystromformer_adds_a_convolution_along_the_sequence_with_one_filter_per_head() -> None:
    q, k, v = tokens(12)
    module = build("nystromformer", landmarks=4, conv_kernel=5)
    plain = build("nystromformer", landmarks=4, conv_kernel=None)
    filters = module.local.conv.weight[:, 0]
    padded = F.pad(v, (0, 0, 2, 2))
    expected = sum(filters[:, t, None, None] * padded[:, :, t : t + 12] for t in range(5))
    close(module(q, k, v) - plain(q, k, v), expected)


def test_segment_means_skip_padding_wherever_it_is() -> None:
    x = torch.randn(1, 2, 11, 3, dtype=torch.float64)
    mask = torch.tensor([[1, 0, 1, 1, 0, 1, 1, 1, 0, 1, 0]], dtype=torch.bool)
    masked, used = segment_means(x.masked_fill(~mask[:, None, :, None], 0.0), mask, 3)
    kept, _ = segment_means(x[:, :, mask[0]], None, 3)
    close(masked, kept)
    assert used.all()


def test_iterative_inverse_is_the_pseudo_inverse_also_of_singular_matrices() -> None:
    low_rank = torch.rand(3, 5, 2, dtype=torch.float64) @ torch.rand(3, 2, 5, dtype=torch.float64)
    # more steps than needed only amplify rounding where there is no singular value
    close(iterative_pseudo_inverse(low_rank, 12), torch.linalg.pinv(low_rank, rtol=1e-9), 1e-8)


def test_kernelized_attention_is_the_unnormalised_gaussian_kernel() -> None:
    q, k, v = tokens(7, 9)
    close(build("kernelized")(q, k, v), gaussian(q, k) @ v)
    wide = torch.randn(B, H, 9, 3 * D, dtype=torch.float64)
    close(build("kernelized")(q, k, wide), gaussian(q, k) @ wide)


def test_kernelized_attention_keeps_precision_when_all_keys_are_far() -> None:
    q, k, v = tokens(7, 9)
    k = k + 12.0
    expected = gaussian(q, k) @ v
    assert expected.abs().max() < 1e-30
    torch.testing.assert_close(build("kernelized")(q, k, v), expected, rtol=1e-9, atol=0.0)


def test_skyformer_is_nystrom_of_the_gaussian_kernel_at_its_sampled_tokens() -> None:
    q, k, v = tokens(21, 17)
    module = build("skyformer", features=8, inverse_iters=40)
    picked = [x[:, :, (p * x.shape[2]).long()] for x, p in zip((q, k), module.positions, strict=True)]
    sampled = torch.cat(picked, 2)
    core = gaussian(sampled, sampled) + 0.1 * torch.eye(8, dtype=torch.float64)
    expected = gaussian(q, sampled) @ torch.linalg.inv(core) @ gaussian(sampled, k) @ v
    close(module(q, k, v), expected, 1e-8)


def test_skyformer_with_every_token_sampled_is_kernelized_attention() -> None:
    q, k, v = tokens(9, scale=2.0)
    module = build("skyformer", features=18, ridge=0.0, inverse_iters=60)
    close(module(q, k, v), build("kernelized")(q, k, v), 1e-7)


def test_skyformer_samples_each_stratum_once_and_redraws() -> None:
    module = attention.build("skyformer", head_dim=4, num_heads=1, features=20)
    assert torch.equal((module.positions * 10).floor(), torch.arange(10.0).expand(2, 10))
    before = module.positions.clone()
    module.redraw(torch.Generator().manual_seed(3))
    assert not torch.equal(before, module.positions)


# Vision blocks


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


def test_depthwise_mixing_names_values_of_the_wrong_width() -> None:
    with pytest.raises(ValueError, match="values must have the dimension of the heads"):
        DepthwiseMixing(8, "1d", sharing="heads")(torch.randn(1, 2, 5, 7))


# Gradients

GRADCHECKED: dict[str, dict[str, object]] = {
    "sinkformer": {"half_steps": 5},
    "espformer": {"tau": 0.5, "temperature": 2.0},
    "espformer-hard": {"temperature": 2.0},
    "linear-transformer": {},
    "performer": {"features": 5},
    "linformer": {"rank": 3, "max_length": 5},
    "nystromformer": {"landmarks": 3, "conv_kernel": 3, "inverse_iters": 3},
    "kernelized": {},
    "skyformer": {"features": 4, "inverse_iters": 3},
    "cosformer": {},
    "hedgehog": {},
    "t2r": {"features": 4},
    "efficient": {},
    "hydra": {},
    "angular": {"conv_kernel": 3},
    "flatten": {"kernel_size": 3, "num_tokens": 4},
    "enhanced": {},
    "polaformer": {"kernel_size": 3, "num_tokens": 4},
    "mobiattention": {},
}


@pytest.mark.parametrize("name", GRADCHECKED)
def test_gradients_are_those_of_the_formula_also_under_a_mask(name: str) -> None:
    module = attention.build(name, head_dim=4, num_heads=2, **GRADCHECKED[name]).double()
    q, k, v = (torch.randn(2, 2, 4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.tensor([[True, True, True, True], [True, True, False, False]])
    parameters = tuple(module.parameters())

    def run(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        return module(q, k, v, mask, mask, grid=(2, 2))

    assert torch.autograd.gradcheck(run, (q, k, v, *parameters))


# Bad input


@pytest.mark.parametrize("name", GRADCHECKED)
def test_nothing_to_read_gives_zeros(name: str) -> None:
    module = attention.build(name, head_dim=4, num_heads=2)
    q = torch.randn(2, 2, 4, 4, requires_grad=True)
    nothing = torch.randn(2, 2, 0, 4)
    assert module(nothing, nothing, nothing).shape == (2, 2, 0, 4)
    if not attention.entry(name).needs_equal_lengths:
        out = module(q, nothing, nothing)
        assert not out.any()
        out.sum().backward()


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ({"key_mask": torch.ones(2, 9)}, "key_mask.*boolean.*torch.float32"),
        ({"key_mask": torch.ones(9, dtype=torch.bool)}, r"key_mask.*\(2, 9\).*\(9,\)"),
        ({"query_mask": torch.ones(2, 9, dtype=torch.bool)}, r"query_mask.*\(2, 7\).*\(2, 9\)"),
    ],
    ids=["float", "no-batch", "wrong-length"],
)
def test_masks_of_the_wrong_kind_or_shape_are_named(masks: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build("performer")(*tokens(7, 9), **masks)


def test_tokens_of_another_layer_are_named() -> None:
    q, k, v = tokens(7)
    with pytest.raises(ValueError, match=r"3 heads of dimension 6.*\(2, 2, 7, 6\)"):
        build("cosformer")(q[:, :2], k[:, :2], v[:, :2])
    with pytest.raises(ValueError, match="keys and values"):
        build("cosformer")(q, k, v[:, :, :5])
