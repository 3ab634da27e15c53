"""The layer: prefix rows, local mixing, pivots, and any mechanism between the projections."""

from __future__ import annotations

import pytest
import torch

import lotformer
from lotformer.nn import KeyMasses, PivotMeasure, PrefixRows
from support.problems import lengths_mask


def tokens(batch=2, heads=3, n=12, dim=8):
    return torch.randn(3, batch, heads, n, dim).unbind(0)


@pytest.mark.parametrize("beta", [None, 0.7])
def test_prefix_rows_are_softmax_over_all_tokens_and_the_rest_is_doubly_stochastic(beta):
    mechanism = lotformer.attention.build(
        "lot", head_dim=8, num_heads=3, rank=4, solver="newton", prefix_tokens=2, prefix_beta=beta
    )
    q, k, v = tokens()
    out = mechanism(q, k, v)
    weights = (q[:, :, :2] @ k.mT * (8**-0.5 if beta is None else beta)).softmax(-1)
    torch.testing.assert_close(out[:, :, :2], weights @ v)
    plan = mechanism.coupling(q, k)
    assert plan.query_plan.shape[2] == 10
    assert plan.doubly_stochastic_error().max() < 1e-5
    torch.testing.assert_close(out[:, :, 2:], plan.apply(v[:, :, 2:]))


def test_polarised_prefix_follows_its_formula():
    q, k, v = tokens(1, 1, 5, 4)
    powers = (1.5, 0.5)
    got = PrefixRows(0.8, polarize=True, powers=powers)(q[:, :, :1], k, v)
    scores = torch.zeros(5)
    for j in range(5):
        like = opposite = 0.0
        for a, b in zip(0.8 * q[0, 0, 0], k[0, 0, j], strict=True):
            like += float(a * b) if a * b > 0 else 0.0
            opposite += float(-a * b) if a * b < 0 else 0.0
        scores[j] = like ** powers[0] + opposite ** powers[1]
    torch.testing.assert_close(got[0, 0, 0], scores.softmax(0) @ v[0, 0])


@pytest.mark.parametrize("dim", [32, 64])
@pytest.mark.parametrize("size", [1.0, 0.3], ids=["unit tokens", "as a transformer starts"])
def test_polarised_scores_have_no_temperature_and_rise_with_the_product(dim, size):
    q, k, v = (size * x for x in tokens(1, 1, 2000, dim))
    like, opposite = ((s * (q[:, :, :1] * k)).relu().sum(-1) for s in (1, -1))
    scores = like + opposite**0.5
    torch.testing.assert_close(PrefixRows(polarize=True)(q[:, :, :1], k, v)[0, 0], scores.softmax(-1)[0] @ v[0, 0])
    correlation = torch.corrcoef(torch.stack([scores.flatten(), (q[:, :, :1] * k).sum(-1).flatten()]))[0, 1]
    assert correlation > 0.1


@pytest.mark.parametrize("polarize", [False, True])
def test_prefix_and_convolution_honour_padding(polarize):
    mechanism = lotformer.attention.build(
        "lot", head_dim=8, num_heads=3, rank=4, prefix_tokens=1, polarize_prefix=polarize, local_conv="1d"
    )
    q, k, v = tokens()
    mask = lengths_mask([12, 7], 12)
    dirty = [t.clone() for t in (q, k, v)]
    for t in dirty:
        t.transpose(1, 2)[~mask] = float("nan")
    out = mechanism(*dirty, mask, mask)
    short = mechanism(*(t[1:, :, :7] for t in (q, k, v)))
    torch.testing.assert_close(out[1:, :, :7], short)
    assert (out[1, :, 7:] == 0).all()
    empty = lengths_mask([12, 0], 12)
    assert (mechanism(*dirty[:3], empty, empty)[1] == 0).all()


@pytest.mark.parametrize(("sharing", "filters"), [("none", 2), ("heads", 1)])
def test_two_dimensional_mixing_is_a_depthwise_convolution_of_the_values_on_the_grid(sharing, filters):
    mechanism = lotformer.attention.build(
        "lot", head_dim=4, num_heads=2, rank=3, prefix_tokens=1, local_conv="2d", conv_sharing=sharing
    )
    q, k, v = tokens(2, 2, 1 + 3 * 5, 4)
    out = mechanism(q, k, v, grid=(3, 5))
    kernel = mechanism.local.conv.weight.view(filters, 4, 3, 3).expand(2, 4, 3, 3)
    local, mechanism.local = mechanism.local, None
    without = mechanism(q, k, v)
    mechanism.local = local
    image = torch.nn.functional.pad(v[:, :, 1:].unflatten(2, (3, 5)), (0, 0, 1, 1, 1, 1))
    for row, column in ((0, 0), (1, 3), (2, 4)):
        patch = image[:, :, row : row + 3, column : column + 3]  # (B, H, 3, 3, D)
        expected = torch.einsum("bhijd,hdij->bhd", patch, kernel)
        index = 1 + 5 * row + column
        torch.testing.assert_close(out[:, :, index] - without[:, :, index], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out[:, :, 0], without[:, :, 0])


def test_sharing_of_filters_is_checked():
    with pytest.raises(ValueError, match="conv_sharing must be one of 'none', 'heads', got 'channels'"):
        lotformer.LOTAttention(8, num_heads=2, local_conv="1d", conv_sharing="channels")


@pytest.mark.parametrize("kind", ["linear", "query-aware"])
def test_key_masses_follow_their_formula_over_real_tokens(kind):
    module = KeyMasses(3, 8, kind)
    with torch.no_grad():
        module.direction.bias.normal_()
    q, k, _ = tokens()
    mask = lengths_mask([12, 5], 12, "left")
    logits = torch.einsum("bhmd,hd->bhm", k, module.direction.bias)
    if kind == "query-aware":
        with torch.no_grad():
            module.query_weight.bias.uniform_(0.5, 2)
        mean = torch.stack([q[b, :, mask[b]].mean(1) for b in range(2)])
        logits = logits + module.query_weight.bias[:, None] * torch.einsum("bhmd,bhd->bhm", k, mean) * 8**-0.5
    expected = logits.masked_fill(~mask[:, None], -torch.inf).softmax(-1)
    for t in (q, k):
        t.transpose(1, 2)[~mask] = float("nan")
    torch.testing.assert_close(module(q, k, mask, mask), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_key_masses_are_computed_in_full_precision_in_a_half_precision_model(dtype):
    module = KeyMasses(3, 8, "query-aware").to(dtype)
    q, k, _ = (x.to(dtype) for x in tokens())
    exact = KeyMasses(3, 8, "query-aware")(q.float(), k.float())
    torch.testing.assert_close(module(q, k), exact)


@pytest.mark.parametrize("key_masses", ["uniform", "linear", "query-aware"])
def test_a_sequence_of_prefix_tokens_alone_passes(key_masses):
    layer = lotformer.LOTAttention(8, 2, rank=3, prefix_tokens=1, key_masses=key_masses)
    x = torch.randn(2, 1, 8)
    torch.testing.assert_close(layer(x), layer.proj(layer.qkv(x)[..., 16:]))


def test_uniform_key_masses_are_none_and_have_no_parameters():
    module = KeyMasses(3, 8)
    assert module(*tokens()[:2]) is None
    assert not list(module.parameters())


@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize("eps", [0.05, 1.0, 25.0])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_scores_over_eps_start_with_a_deviation_of_one(dim, eps, scale):
    mechanism = lotformer.attention.build("lot", head_dim=dim, num_heads=8, rank=64, eps=eps, scale=scale)
    points = mechanism.pivots(torch.empty(0))[0]
    scores = torch.randn(8, 500, dim) @ points.mT * (dim**-0.5 if scale is None else scale) / eps
    assert scores.std().item() == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize(("init", "std"), [("small", 0.02), ("unit", 1.0)])
def test_pivots_start_at_their_scale_with_uniform_masses(init, std):
    measure = PivotMeasure(8, 64, 32, init=init)
    assert measure.points.bias.std().item() == pytest.approx(std, rel=0.05)
    torch.testing.assert_close(measure(torch.empty(0))[1].exp(), torch.full((8, 64), 1 / 64))


def test_pivots_can_be_placed_on_real_tokens():
    measure = PivotMeasure(3, 7, 8, init="data")
    _, k, _ = tokens()
    mask = lengths_mask([3, 2], 12)
    k.transpose(1, 2)[~mask] = float("nan")
    measure.initialize_from(k, mask, scale=0.5)
    real = torch.cat([k[b, :, mask[b]] for b in range(2)], 1)  # (H, 5, D): fewer than pivots
    distances = torch.cdist(measure.points.bias, 0.5 * real).min(-1).values
    assert distances.max() < 1e-6
    with pytest.raises(ValueError, match=r"expected tokens \(B, 3, N, 8\)"):
        measure.initialize_from(torch.randn(2, 4, 5, 8))
    with pytest.raises(ValueError, match="no real token"):
        measure.initialize_from(k, torch.zeros_like(mask))


def test_fixed_masses_are_not_parameters_and_temperature_flattens():
    assert "logits.bias" not in dict(PivotMeasure(2, 4, 8, learn_masses=False).named_parameters())
    spread = {}
    for temperature in (0.1, 10.0):
        measure = PivotMeasure(2, 4, 8, mass_temperature=temperature)
        with torch.no_grad():
            measure.logits.bias.copy_(torch.arange(8.0).view(2, 4))
        spread[temperature] = measure(torch.empty(0))[1].exp().max().item()
    assert spread[0.1] > 0.99
    assert spread[10.0] < 0.4


def test_learned_eps_starts_where_it_is_told_and_learns():
    layer = lotformer.LOTAttention(16, 2, rank=4, eps=0.3, learn_eps=True)
    torch.testing.assert_close(layer.mechanism.eps, torch.full((2,), 0.3))
    layer(torch.randn(2, 9, 16)).square().sum().backward()
    assert layer.mechanism.log_eps.bias.grad.abs().min() > 0


def test_the_layer_takes_the_masks_and_state_of_timm_blocks():
    layer = lotformer.LOTAttention(24, 3, rank=4, qkv_bias=False)
    assert layer.qkv.weight.shape == (72, 24)
    assert layer.qkv.bias is None
    assert layer.proj.weight.shape == (24, 24)
    x, mask = torch.randn(2, 10, 24), lengths_mask([10, 6], 10)
    torch.testing.assert_close(layer(x, mask=mask)[1:, :6], layer(x[1:, :6]))


@pytest.mark.parametrize("shape", [(1, 1), (2, 5)], ids=["one", "many"])
def test_one_head_one_pivot_one_token(shape):
    heads, n = shape
    layer = lotformer.LOTAttention(heads * 8, heads, rank=1, solver="newton")
    x = torch.randn(1, n, heads * 8)
    v = layer.qkv(x)[..., 2 * heads * 8 :]
    # one pivot carries everything: every token receives the mean of the values
    torch.testing.assert_close(layer(x), layer.proj(v.mean(1, keepdim=True).expand_as(v)))


@pytest.mark.parametrize("mechanism", ["softmax", "lot"])
def test_the_host_layer_takes_any_mechanism_by_name(mechanism):
    layer = lotformer.AttentionLayer(16, 2, mechanism)
    assert layer(torch.randn(2, 9, 16)).shape == (2, 9, 16)


def test_what_is_no_tensor_is_refused_with_what_to_do():
    layer, x, real = lotformer.LOTAttention(16, 2, rank=3), torch.randn(2, 9, 16), torch.ones(2, 9, dtype=torch.bool)
    for name, arguments in {
        "x": {"x": x.numpy()},
        "mask": {"x": x, "mask": real.tolist()},
        "attn_mask": {"x": x, "attn_mask": real[:, None, None].tolist()},
    }.items():
        with pytest.raises(TypeError, match=rf"`{name}`: expected a tensor, got \w+: use torch.as_tensor\({name}\)"):
            layer(**arguments)
    with pytest.raises(ValueError, match=r"eps must be above 0, got '0\.1'"):
        lotformer.LOTAttention(16, 2, eps="0.1")


@pytest.mark.parametrize("mechanism", ["softmax", "lot"])
def test_calls_in_the_words_of_other_layers_are_answered(mechanism):
    layer, x = lotformer.AttentionLayer(16, 2, mechanism), torch.randn(2, 9, 16)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    for call in (lambda: layer(x, x, x), lambda: layer(x, x)):
        with pytest.raises(TypeError, match=r"takes its tokens once, `layer\(x, mask=real_tokens\)`"):
            call()
    with pytest.raises(TypeError, match=r"`key_padding_mask`, True at padding, but `mask`.*`mask=~key_padding_mask`"):
        layer(x, key_padding_mask=padding)
    with pytest.raises(TypeError, match=r"has no `need_weights`"):
        layer(x, need_weights=False)
