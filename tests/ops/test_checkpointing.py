"""Activation checkpointing: every operator can be run again in the backward pass, and its gradients do not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lotformer.nn import DepthwiseMixing, KeyMasses, NearKeys, PrefixRows
from lotformer.ops import cpu
from support.cpu_kernel import FORMS, attend, needs_kernel, problem, scored

Function = Callable[..., Any]
Given = tuple[Function, list[Tensor]]


def tokens(*lengths: int, dim: int = 16) -> list[Tensor]:
    return [torch.randn(2, length, 3, dim).transpose(1, 2) for length in lengths]


def transport(form: str, *, from_scores: bool = False, extras: bool = False) -> Given:
    """The operator; with extras, there is padding, tokens have masses and heads have temperatures."""
    x = problem(query_masses=extras, key_masses=extras)
    leaves = {name: t.float() for name, t in (scored(x) if from_scores else x).items()}
    options = dict(FORMS[form])
    if extras:
        options |= {name: torch.rand(2, 61) < 0.8 for name in ("query_mask", "key_mask")}
        for name, mask in (("query_masses", options["query_mask"][:, None]), ("key_masses", options["key_mask"])):
            masses = leaves[name] * mask
            leaves[name] = masses / masses.sum(-1, keepdim=True)
        leaves["eps"] = torch.tensor([0.3, 1.0, 2.0])
    return lambda *given: attend(dict(zip(leaves, given, strict=True)), backend="cpu", **options), [*leaves.values()]


def near_keys(kind: Any, size: int, grid: tuple[int, int]) -> Given:
    near, length = NearKeys(3, 16, kind, size), grid[0] * grid[1]
    mask = torch.rand(2, length + 1) < 0.8
    x = tokens(length, length + 1, length + 1)
    assert cpu.near.why_unsupported(*x) is None
    return lambda q, k, v: near(q, k, v, mask, grid, mask[:, 1:]), x


def pooling() -> Given:
    x = tokens(2, 37, 37)
    assert cpu.pooling.why_unsupported(*x) is None
    return PrefixRows(polarize=True), x


def key_masses(kind: Any) -> Given:
    q, k = tokens(21, 37)
    module = KeyMasses(3, 16, kind)
    assert module.direction is not None
    assert cpu.masses.why_unsupported(q, k, module.direction.bias, None) is None
    return lambda q, k: module(q, k) + 0 * q.sum(), [q, k]


def joining(kind: Any) -> Given:
    mixing, grid = DepthwiseMixing(48, kind), (5, 7) if kind == "2d" else None
    x = tokens(2, 35, 37)
    assert cpu.joining.why_unsupported(*x, mixing.conv.weight) is None
    return lambda rows, out, v: mixing.joined(rows, out, v, grid=grid), x


def depthwise() -> Given:
    return DepthwiseMixing(48, "1d"), tokens(35)


OPERATORS: dict[str, Callable[[], Given]] = {
    **{f"transport, {form}": lambda form=form: transport(form) for form in FORMS},
    **{f"transport, {form}, extras": lambda form=form: transport(form, extras=True) for form in FORMS},
    **{f"scores, {form}": lambda form=form: transport(form, from_scores=True) for form in FORMS},
    "window, text, narrow": lambda: near_keys("1d", 5, (1, 150)),
    "window, text, wide": lambda: near_keys("1d", 65, (1, 150)),
    "window, image, narrow": lambda: near_keys("2d", 3, (9, 8)),
    "window, image, wide": lambda: near_keys("2d", 9, (11, 12)),
    "pooling": pooling,
    "key masses, linear": lambda: key_masses("linear"),
    "key masses, query-aware": lambda: key_masses("query-aware"),
    "joining, text": lambda: joining("1d"),
    "joining, image": lambda: joining("2d"),
    "depthwise": depthwise,
}


def outcome(function: Function, given: list[Tensor]) -> list[Tensor | None]:
    """All outputs, and the gradients of what was given: None where nothing depends on it."""
    leaves = [x.detach().requires_grad_() for x in given]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, [torch.arange(y.numel()).sin().view(y.shape) for y in outputs])
    assert all(y.isfinite().all() for y in outputs)
    return [*outputs, *(x.grad for x in leaves)]


@needs_kernel
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_that_runs_again_has_the_same_gradients(name: str, use_reentrant: bool) -> None:
    function, given = OPERATORS[name]()
    expected = outcome(function, given)
    found = outcome(lambda *x: checkpoint(function, *x, use_reentrant=use_reentrant), given)
    for have, want in zip(found, expected, strict=True):
        assert (have is None and want is None) or torch.equal(have, want)


@needs_kernel
@pytest.mark.parametrize("name", ["transport, newton, keys, extras", "window, text, wide", "pooling", "joining, image"])
def test_a_compiled_operator_that_runs_again_has_its_gradients(name: str) -> None:
    function, given = OPERATORS[name]()
    compiled = torch.compile(lambda *x: checkpoint(function, *x, use_reentrant=False), backend="aot_eager")
    for have, want in zip(outcome(compiled, given), outcome(function, given), strict=True):
        torch.testing.assert_close(have, want)
