"""What padding holds reaches no gradient: 0 · NaN is NaN, so whatever is multiplied by padding has to be clean."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lotformer
from lotformer import attention
from lotformer.conversion.calling import call
from lotformer.data.batches import main_tensor
from lotformer.layers import split_tokens
from support.small_models import SMALL

FILLERS = (torch.nan, torch.inf, 1e30)
SMALLER = {"linformer": {"max_length": 64}, "lowrank-ot": {"outer_steps": 4, "inner_steps": 4}}
ROWS, COLUMNS = 3, 5
MASK = torch.ones(2, ROWS * COLUMNS, dtype=torch.bool)
MASK[0, 9:] = MASK[1, :4] = False


def run(function, x: Tensor, mask: Tensor, module: nn.Module) -> list[tuple[str, Tensor]]:
    """The output and every gradient, at real tokens, of a loss that looks at those alone."""
    x = x.clone().requires_grad_()
    torch.manual_seed(3)  # for mechanisms that draw
    out = function(x)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(out.dtype)
    (out * weights)[mask].sum().backward()
    found = [("out", out.detach()[mask]), ("x", x.grad[mask])]
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            found.append((name, parameter.grad))
            parameter.grad = None
    return found


def assert_padding_is_nothing(function, x: Tensor, mask: Tensor, module: nn.Module) -> None:
    """With anything in the padding as with zeros there."""
    padding = ~mask[..., None]
    expected = run(function, x.masked_fill(padding, 0.0), mask, module)
    assert all(value.isfinite().all() for _, value in expected)
    for filler in FILLERS:
        for (name, got), (_, want) in zip(run(function, x.masked_fill(padding, filler), mask, module), expected,
                                          strict=True):  # fmt: skip
            assert got.isfinite().all(), f"{name}, with {filler} in the padding"
            torch.testing.assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}")


def masks(prefix: int, length: int) -> st.SearchStrategy[Tensor]:
    """Padding on either side, in the middle, of all of a sample, or of nothing."""
    body = st.lists(st.lists(st.booleans(), min_size=length, max_size=length), min_size=2, max_size=3)
    return body.map(lambda rows: torch.tensor([[True] * prefix + row for row in rows]))


@st.composite
def layers(draw: st.DrawFn) -> tuple[nn.Module, Tensor, Tensor]:
    """A layer of LOT attention in any of its forms, tokens and a mask."""
    torch.manual_seed(draw(st.integers(0, 99)))
    prefix = draw(st.integers(0, 2))
    options = {
        "rank": draw(st.sampled_from([1, 4])),
        "solver": draw(st.sampled_from(["sinkhorn", "newton"])),
        "balance": draw(st.sampled_from(["both", "keys", "none"])),
        "window": draw(st.sampled_from([None, None, "1d", "2d"])),
        "pivots": draw(st.sampled_from(["fixed", "fixed", "input-aware"])),
        "key_masses": draw(st.sampled_from(["uniform", "linear", "query-aware"])),
        "local_conv": draw(st.sampled_from([None, "1d", "2d"])),
        "learn_eps": draw(st.booleans()),
        "prefix_tokens": prefix,
        "polarize_prefix": bool(prefix) and draw(st.booleans()),
        "backend": draw(st.sampled_from([None, None, "reference"])),
    }
    layer = lotformer.LOTAttention(24, draw(st.sampled_from([1, 2, 3])), qkv_bias=draw(st.booleans()), **options)
    if options["window"] is None and options["pivots"] == "fixed" and draw(st.booleans()):
        layer.fold()
    mask = draw(masks(prefix, ROWS * COLUMNS))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    return layer.to(dtype), torch.randn(*mask.shape, 24, dtype=dtype), mask


@settings(max_examples=60)
@given(layers())
def test_of_any_lot_layer(case: tuple[nn.Module, Tensor, Tensor]) -> None:
    layer, x, mask = case
    assert_padding_is_nothing(lambda x: layer(x, mask=mask, grid=(ROWS, COLUMNS)), x, mask, layer)


@pytest.mark.parametrize("name", attention.names())
def test_of_a_layer_around_any_mechanism(name: str) -> None:
    layer = lotformer.AttentionLayer(24, 3, name, **SMALLER.get(name, {}))
    assert_padding_is_nothing(lambda x: layer(x, mask=MASK, grid=(ROWS, COLUMNS)), torch.randn(2, 15, 24), MASK, layer)


def behind_a_norm(mechanism: nn.Module, mask: Tensor, head_dim: int) -> Callable[[Tensor], Tensor]:
    """A residual connection around a mechanism and a norm, whose gradient where it meets a NaN is NaN."""

    def attended(x: Tensor) -> Tensor:
        q = split_tokens(x, head_dim)
        out = mechanism(q, q, q, mask, mask, grid=(ROWS, COLUMNS)).transpose(1, 2).flatten(2)
        return nn.functional.layer_norm(x + out, x.shape[-1:])

    return attended


@settings(max_examples=60)
@given(layers())
def test_of_lot_alone_when_what_comes_back_at_padding_is_not_finite_either(
    case: tuple[nn.Module, Tensor, Tensor],
) -> None:
    layer, x, mask = case
    mechanism = layer.mechanism
    assert_padding_is_nothing(behind_a_norm(mechanism, mask, layer.head_dim), x, mask, mechanism)


@pytest.mark.parametrize("name", attention.names())
def test_of_any_mechanism_alone_when_what_comes_back_at_padding_is_not_finite_either(name: str) -> None:
    mechanism = attention.build(name, head_dim=8, num_heads=3, **SMALLER.get(name, {}))
    assert_padding_is_nothing(behind_a_norm(mechanism, MASK, 8), torch.randn(2, 15, 24), MASK, mechanism)


FIXED = {"window": None, "pivots": "fixed"}
CONVERTED = {
    "default": ({}, False),
    "fixed": (FIXED, False),
    "folded": (FIXED, True),
    "folded-prefix": ({**FIXED, "prefix_tokens": 1}, True),
}


@pytest.mark.parametrize("kind", CONVERTED)
def test_of_a_converted_encoder(kind: str) -> None:
    """The host's own linear maps multiply what is in the padding; the mechanisms and real tokens must not see it."""
    options, folded = CONVERTED[kind]
    model, real = SMALL["bert"].build(), torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]]).bool()
    lotformer.convert(model, rank=5, pivot_init="unit", **options)
    if folded:
        lotformer.fold(model)
    mechanisms = nn.ModuleList(m for m in model.modules() if isinstance(m, attention.Attention))
    assert len(mechanisms) == 2

    def encoded(x: Tensor) -> Tensor:
        return main_tensor(call(model, {"inputs_embeds": x, "attention_mask": real.long()}))

    assert_padding_is_nothing(encoded, torch.randn(2, 7, 24), real, mechanisms)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_of_a_compiled_layer(compiler: str) -> None:
    torch._dynamo.reset()
    layer = lotformer.LOTAttention(24, 3, rank=4, prefix_tokens=1)
    mask = torch.arange(9) < torch.tensor([[9], [5]])
    compiled = torch.compile(layer, backend=compiler, fullgraph=True)
    assert_padding_is_nothing(lambda x: compiled(x, mask=mask), torch.randn(2, 9, 24), mask, layer)
