"""The table of operators and backends: what is forced by name, what is chosen, and what is said about the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lotformer.attention import build
from lotformer.nn import DepthwiseMixing, KeyMasses, NearKeys, PrefixRows
from lotformer.ops import Grouping, backends, found_attention
from support.cpu_kernel import needs_kernel

MODULES = {
    "window": (lambda x, **named: NearKeys(2, 8, "1d")(x, x, x, **named), "window"),
    "pooling": (lambda x, **named: PrefixRows(polarize=True)(x[:, :, :1], x, x, **named), "pooling"),
    "key masses": (lambda x, **named: KeyMasses(2, 8, "query-aware")(x, x, **named), "key masses"),
    "joined rows": (lambda x, **named: DepthwiseMixing(16, "1d").joined(None, x, x, **named), "joined rows"),
}


class Called(Exception):
    """A backend ran."""


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Which backends run, per operator."""
    found: list[tuple[str, str]] = []

    def noted(operator: str, backend: backends.Backend) -> backends.Backend:
        def run(*problem: Any) -> Any:
            found.append((operator, backend.name))
            return backend.run(*problem)

        return replace(backend, run=run)

    for operator in backends.OPERATORS:
        monkeypatch.setattr(operator, "backends", tuple(noted(operator.name, x) for x in operator.backends))
    return found


@needs_kernel
@pytest.mark.parametrize(("name", "chosen"), [(None, "cpu"), ("cpu", "cpu"), ("reference", "reference")])
def test_a_layer_runs_all_its_operators_on_the_backend_that_it_names(name, chosen, ran) -> None:
    parts = {"prefix_tokens": 1, "polarize_prefix": True, "local_conv": "1d", "window": "1d"}
    mechanism = build("lot", head_dim=8, num_heads=2, rank=4, key_masses="query-aware", backend=name, **parts)
    mechanism(*torch.randn(3, 2, 2, 30, 8))
    found_attention(*torch.randn(3, 2, 2, 30, 8), Grouping(4), backend=name)
    assert set(ran) == {(operator.name, chosen) for operator in backends.OPERATORS}


@needs_kernel
@pytest.mark.parametrize(("module", "operator"), MODULES.values(), ids=MODULES)
def test_a_named_backend_that_cannot_take_the_problem_says_why(module, operator) -> None:
    x = torch.randn(1, 2, 9, 8, dtype=torch.float64)
    assert isinstance(module(x) if operator != "window" else module(x)[0], Tensor)
    with pytest.raises(ValueError, match=f"'cpu' cannot be used here for the {operator}: it takes float32.*float64"):
        module(x, backend="cpu")
    with pytest.raises(ValueError, match="expected None or one of 'cpu', 'triton', 'reference', got 'abacus'"):
        module(x, backend="abacus")


@needs_kernel
@pytest.mark.parametrize(("module", "operator"), MODULES.values(), ids=MODULES)
def test_a_backend_without_the_operator_leaves_the_choice_free(module, operator, ran) -> None:
    module(torch.randn(1, 2, 9, 8), backend="triton")
    assert ran == [(operator, "cpu")]


@pytest.mark.parametrize(("module", "operator"), MODULES.values(), ids=MODULES)
def test_a_backend_put_first_in_a_row_of_the_table_is_what_modules_run(module, operator, monkeypatch) -> None:
    def run(*problem: Any) -> Any:
        raise Called

    row = next(row for row in backends.OPERATORS if row.name == operator)
    mine = backends.Backend("mine", run, lambda: None, lambda *problem: None)
    monkeypatch.setattr(row, "backends", (mine, *row.backends))
    with pytest.raises(Called):
        module(torch.randn(1, 2, 9, 8))


@needs_kernel
def test_a_convolution_with_a_hook_is_called_whatever_backend_is_named(ran) -> None:
    mixing, x = DepthwiseMixing(16, "1d"), torch.randn(1, 2, 9, 8)
    expected = mixing.joined(None, x, x)
    seen = []
    mixing.conv.register_forward_hook(lambda *call: seen.append(call))
    ran.clear()
    torch.testing.assert_close(mixing.joined(None, x, x, backend="cpu"), expected)
    assert seen
    assert not ran
