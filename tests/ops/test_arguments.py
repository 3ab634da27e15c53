"""The operator's arguments are stated once: what must be equal in Python, C++ and Triton is equal."""

from __future__ import annotations

import inspect

import pytest
import torch

import lotformer
from lotformer.ops import newton
from lotformer.ops.cpu import op, pooling
from lotformer.ops.cpu.operators import Signature
from lotformer.ops.problem import LEAST_LOG_MASS, Solve, Transport
from support.cpu_kernel import needs_kernel


@pytest.mark.parametrize("function", [lotformer.lot_attention, lotformer.coupling])
def test_the_public_functions_take_both_structs_with_their_defaults(function):
    taken = inspect.signature(function).parameters
    for struct in (Transport, Solve):
        for name in struct._fields:
            if name == "v" and function is lotformer.coupling:
                continue
            assert taken[name].default == struct._field_defaults.get(name, inspect.Parameter.empty), name


@needs_kernel
@pytest.mark.parametrize("name", ["cpu", "near", "pool", "key_masses", "found"])
def test_backward_takes_gradients_then_outputs_then_the_inputs_of_forward(name: str):
    """What the gradients of an operator are derived from."""
    forward, backward = Signature(f"{name}_forward"), Signature(f"{name}_backward")
    before = len(backward.arguments) - len(forward.arguments)
    assert backward.arguments[before:] == forward.arguments
    kept = [argument for argument in backward.arguments[:before] if argument in forward.returns]
    assert kept == forward.returns[-len(kept) :]
    grads = backward.arguments[: before - len(kept)]
    assert grads
    assert all(argument.startswith("grad") for argument in grads)
    assert backward.returns == forward.arguments[: len(backward.returns)]


@needs_kernel
def test_an_operator_refuses_names_it_does_not_have():
    q = torch.randn(1, 1, 3, 4)
    given = {"q": q, "k": q, "v": q, "key_mask": None, "beta": 1.0, "like": 1.0, "opposite": 0.5}
    assert pooling._operator(**dict(reversed(given.items())))[0].shape == q.shape
    with pytest.raises(KeyError, match="opposite"):
        pooling._operator(**{name: x for name, x in given.items() if name != "opposite"}, other=0.5)
    with pytest.raises(RuntimeError, match="at most 7 argument"):
        pooling._operator(**given, more=1)


@needs_kernel
def test_the_constants_of_the_kernel_are_those_of_python():
    """Triton's are taken from Python."""
    from lotformer.ops.cpu import _kernel

    expected = {f"LEAST_LOG_MASS {solver}": mass for solver, mass in LEAST_LOG_MASS.items()}
    for name, number in _kernel.constants().items():
        if name not in expected:
            expected[name] = getattr(op if hasattr(op, name) else newton, name)
        assert number == expected[name], name
