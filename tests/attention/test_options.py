"""Numbers that a mechanism takes as options: what no forward survives is refused where the mechanism is made."""

from __future__ import annotations

import inspect

import pytest
import torch

from lotformer import attention

STRANGE = (1e300, -1e300, 1e38, 1e20, 1e6, 1e3, 100.0, 30.0, 3.0, 1e-6, 1e-30, 1e-300, 0.0, -1.0)


def numbers(name: str) -> list[str]:
    parameters = inspect.signature(attention.entry(name).build).parameters.values()
    return [p.name for p in parameters if str(p.annotation) in ("float", "<class 'float'>", "float | None")]


BESIDE = {("lot", "tol"): {"solver": "newton"}, ("lot", "prefix_beta"): {"prefix_tokens": 1}}
"""What an option belongs to, without which it is refused whatever its value."""

OPTIONS = [(name, option) for name in attention.names() for option in numbers(name)]


def test_there_are_some() -> None:
    found = {
        ("softmax", "scale"),
        ("softmax", "dropout"),
        ("sinkformer", "eps"),
        ("lot", "scale"),
        ("lowrank-ot", "step"),
    }
    assert found <= set(OPTIONS)


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_are_refused_or_give_finite_outputs_and_gradients(name: str, option: str) -> None:
    generator = torch.Generator().manual_seed(0)
    accepted, beside = 0, BESIDE.get((name, option), {})
    for value in STRANGE:
        try:
            module = attention.build(name, head_dim=8, num_heads=2, **{option: value}, **beside)
        except ValueError as refusal:
            if option not in str(refusal):
                raise
            continue
        accepted += 1
        # as many tokens as an orthogonal factor without a ridge allows
        tokens = torch.randn(3, 2, 2, 6, 8, generator=generator).requires_grad_()
        out = module(*tokens, grid=(2, 3))
        (gradient,) = torch.autograd.grad(out.sum(), tokens)
        assert out.isfinite().all(), value
        assert gradient.isfinite().all(), value
    assert accepted
