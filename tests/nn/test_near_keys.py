"""The keys a token reads exactly: softmax over prefix and window, unit rows, exact plans for the rest."""

import pytest
import torch
from torch import Tensor

from lotformer import attention
from lotformer.attention.inputs import Inputs
from lotformer.attention.lot import LOT
from lotformer.attention.lot_sides import TokenSides
from lotformer.nn import NearKeys


def _dense(near: NearKeys, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The definition, with all scores formed."""
    length, prefix = q.shape[2], k.shape[2] - q.shape[2]
    place = torch.arange(length)
    if near.kind == "2d":
        row, column = place // grid[1], place % grid[1]
        apart = torch.maximum((row[:, None] - row).abs(), (column[:, None] - column).abs())
    else:
        apart = (place[:, None] - place).abs()
    wanted = torch.cat([torch.ones(length, prefix, dtype=torch.bool), apart <= near.size // 2], -1)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~wanted, -torch.inf)
    mean_key = k[:, :, prefix:].mean(2, keepdim=True)
    w, alpha, b = near.direction.bias, near.mean_weight.bias, near.offset.bias
    rest = (q * (w[:, None] + alpha[:, None, None] * mean_key * q.shape[-1] ** -0.5)).sum(-1) + b[:, None]
    far = (apart > near.size // 2).sum(-1).to(rest)
    return scores.softmax(-1) @ v, (scores.logsumexp(-1) - rest - far.log()).sigmoid()


@pytest.mark.parametrize(
    ("kind", "size", "prefix"), [("1d", 3, 1), ("1d", 1, 0), ("1d", 41, 2), ("2d", 3, 1), ("2d", 5, 0)]
)
def test_it_is_softmax_over_the_prefix_and_the_window(kind: str, size: int, prefix: int) -> None:
    torch.manual_seed(0)
    near = NearKeys(2, 8, kind, size).double()  # type: ignore[arg-type]
    for parameter in near.parameters():
        torch.nn.init.normal_(parameter)
    q = torch.randn(3, 2, 35, 8, dtype=torch.double)
    k, v = torch.randn(2, 3, 2, 35 + prefix, 8, dtype=torch.double)
    out, share = near(q, k, v, grid=(5, 7))
    expected, expected_share = _dense(near, q, k, v, (5, 7))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(share, expected_share)


def _mechanism(**options: object) -> LOT:
    torch.manual_seed(0)
    settings = {"rank": 4, "eps": 0.5, "solver": "newton", "window_size": 3, "key_masses": "query-aware", **options}
    made = attention.build("lot", head_dim=8, num_heads=2, **settings)
    assert isinstance(made, LOT)
    for name, parameter in made.named_parameters():
        if name.startswith("near."):
            torch.nn.init.normal_(parameter, std=0.5)
    return made.eval()


@pytest.mark.parametrize("options", [{"window": "1d", "prefix_tokens": 2}, {"window": "2d"}], ids=["1d", "2d"])
def test_rows_sum_to_one_and_what_is_transported_is_an_exact_plan(options: dict[str, object]) -> None:
    mechanism = _mechanism(**options)
    q, k = torch.randn(2, 2, 2, 25, 8)
    matrix = mechanism(q, k, torch.eye(25).expand(2, 2, 25, 25))
    torch.testing.assert_close(matrix.sum(-1), torch.ones(2, 2, 25))
    plan = mechanism.coupling(q, k)
    assert plan.residual().max() < 1e-5
    identity = torch.eye(25).expand(2, 2, 25, 25)
    near, share = TokenSides(mechanism, Inputs(q, k, identity)).near(identity)
    assert near is not None
    assert share is not None
    prefix = mechanism.prefix_tokens
    carried = matrix[:, :, prefix:] - share[..., None] * near
    received = carried.sum(2)[..., prefix:]
    torch.testing.assert_close(received, (1 - share).sum(-1, keepdim=True) * plan.key_masses, rtol=1e-4, atol=1e-6)


def test_padding_changes_nothing() -> None:
    mechanism = _mechanism(window="1d", prefix_tokens=1, pivots="input-aware")
    q, k, v = torch.randn(3, 1, 2, 20, 8)
    alone = mechanism(*(x[:, :, :13] for x in (q, k, v)))
    mask = torch.arange(20)[None] < 13
    q[:, :, 13:], k[:, :, 13:], v[:, :, 13:] = torch.nan, torch.inf, torch.nan
    padded = mechanism(q, k, v, mask, mask)
    torch.testing.assert_close(padded[:, :, :13], alone, rtol=1e-4, atol=1e-5)
    assert (padded[:, :, 13:] == 0).all()


@pytest.mark.parametrize("learning", [True, False])
@pytest.mark.parametrize("window", ["1d", "2d"])
@pytest.mark.parametrize("padding", [0, 7])
def test_tokens_that_see_every_key_are_softmax(window: str, padding: int, learning: bool) -> None:
    """While learning by way of the plans, otherwise by fused softmax."""
    mechanism = _mechanism(window=window, prefix_tokens=1, pivots="input-aware")
    assert mechanism.near is not None
    mechanism.near.size = 33
    q, k, v = torch.randn(3, 2, 2, 10, 8)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, padding), value=torch.nan) for x in (q, k, v))
    mask = None if padding == 0 else (torch.arange(10 + padding) < 10).expand(2, -1)
    with torch.set_grad_enabled(learning):
        out = mechanism(q, k, v, mask, mask)
    torch.testing.assert_close(out[:, :, :10], expected)
    assert (out[:, :, 10:] == 0).all()


@pytest.mark.parametrize("options", [{}, {"local_conv": "1d"}, {"prefix_tokens": 1, "polarize_prefix": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_inputs_come_out_alike_while_learning_and_after(options: dict, dtype: torch.dtype) -> None:
    mechanism = _mechanism(window="1d", **options)
    assert mechanism.near is not None
    mechanism.near.size = 33
    q, k, v = torch.randn(3, 2, 2, 12, 8).to(dtype)
    mask = torch.arange(12)[None] < torch.tensor([[12], [0]])
    learning = mechanism(q, k, v, mask, mask)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out = mechanism(q, k, v, mask, mask)
    assert out.dtype == learning.dtype == dtype
    rounding = {"rtol": 0, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1.6e-2, "atol": 2e-3}
    torch.testing.assert_close(out, learning.detach(), **rounding)
    assert (out[1] == 0).all() or mechanism.local is not None


def test_only_what_is_softmax_says_so() -> None:
    def says(tokens: int, grid: tuple[int, int] | None = None, **options: object) -> bool:
        mechanism = _mechanism(**{"window": "1d", "window_size": 9, **options})
        return mechanism.is_softmax(tokens, grid)

    assert says(5)
    assert not says(6)
    assert says(6, prefix_tokens=1)
    assert not says(6, prefix_tokens=1, polarize_prefix=True)
    assert not says(6, prefix_tokens=1, prefix_beta=2.0)
    assert not says(5, local_conv="1d")
    assert not LOT(8, 2, key_masses="query-aware").is_softmax(5)
    assert says(25, window="2d")
    assert says(20, (4, 5), window="2d")
    assert not says(20, (2, 10), window="2d")


def test_rows_sum_to_one_where_nothing_but_the_prefix_is_real() -> None:
    mechanism = _mechanism(window="1d", prefix_tokens=1)
    q, k = torch.randn(2, 1, 2, 7, 8)
    mask = torch.arange(7)[None] < 1
    matrix = mechanism(q, k, torch.eye(7).expand(1, 2, 7, 7), mask)
    torch.testing.assert_close(matrix.sum(-1), torch.ones(1, 2, 7))


def test_keys_outside_a_window_of_patches_are_counted_where_they_are_real() -> None:
    torch.manual_seed(0)
    near = NearKeys(2, 8, "2d", 3).double()
    q, k, v = torch.randn(3, 1, 2, 20, 8, dtype=torch.double)
    mask = torch.rand(1, 20) < 0.6
    _, share = near(q, k, v, mask, (4, 5))
    place = torch.arange(20)
    apart = torch.maximum((place[:, None] // 5 - place // 5).abs(), (place[:, None] % 5 - place % 5).abs())
    scores = (q @ k.mT * 8**-0.5).masked_fill((apart > 1) | ~mask, -torch.inf)
    mean_key = k[:, :, mask[0]].mean(2, keepdim=True)
    rest = (q * mean_key).sum(-1) * 8**-0.5 + ((apart > 1) & mask).sum(-1).log()
    torch.testing.assert_close(share, (scores.logsumexp(-1) - rest).sigmoid())


def test_keys_outside_the_window_are_counted_where_they_are_real() -> None:
    """λ of a padded batch is that of its samples alone, in the middle of a text as at its ends."""
    torch.manual_seed(0)
    near = NearKeys(2, 8, "1d", 5)
    q, k, v = torch.randn(3, 1, 2, 12, 8)
    for real in (1, 3, 5, 9):
        mask = torch.arange(12)[None] < real
        _, share = near(q, k, v, mask, None, mask)
        _, alone = near(*(x[:, :, :real] for x in (q, k, v)))
        torch.testing.assert_close(share[:, :, :real], alone)
    _, nothing = near(q, k, v, torch.zeros(1, 12, dtype=torch.bool))
    assert (nothing == 0).all()


def test_every_parameter_learns() -> None:
    mechanism = _mechanism(window="2d", prefix_tokens=1, pivots="input-aware").train()
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 2, 2, 17, 8))
    mechanism(q, k, v).square().sum().backward()
    for name, parameter in mechanism.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_gradients_are_those_of_the_formula() -> None:
    torch.manual_seed(0)
    near = NearKeys(1, 2, "2d").double()
    q = torch.randn(1, 1, 6, 2, dtype=torch.double, requires_grad=True)
    k, v = (torch.randn(1, 1, 7, 2, dtype=torch.double, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda *x: near(*x, None, (2, 3)), (q, k, v))


def test_sequences_of_prefix_tokens_alone_and_wrong_sizes() -> None:
    mechanism = _mechanism(window="1d", prefix_tokens=2)
    assert mechanism(*torch.randn(3, 1, 2, 2, 8)).shape == (1, 2, 2, 8)
    with pytest.raises(ValueError, match="window_size must be odd"):
        NearKeys(1, 4, "1d", 2)
    with pytest.raises(ValueError, match="a window: self-attention only"):
        _mechanism(window="1d")(torch.randn(1, 2, 3, 8), *torch.randn(2, 1, 2, 5, 8))
