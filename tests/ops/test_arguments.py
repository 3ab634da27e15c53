"""The operator's arguments are stated once: what must be equal in Python, C++ and Triton is equal."""

from __future__ import annotations

import inspect

import pytest
import torch

import lotformer
from lotformer.ops import newton
from lotformer.ops.cpu import op
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
def test_the_schemas_of_the_kernel_are_the_structs():
    names = [argument.name for argument in torch.ops.lotformer.cpu_forward.default._schema.arguments]
    assert names == [*op._Tensors._fields, *op._Options._fields]
    backward = torch.ops.lotformer.cpu_backward.default._schema
    given = [argument.name for argument in backward.arguments]
    assert given == ["grad", "state", "mixed", *names]
    returned = [result.name for result in backward.returns]
    assert returned == names[: len(returned)]


@needs_kernel
def test_the_constants_of_the_kernel_are_those_of_python():
    """Triton's are taken from Python."""
    from lotformer.ops.cpu import _kernel

    expected = {f"LEAST_LOG_MASS {solver}": mass for solver, mass in LEAST_LOG_MASS.items()}
    for name, number in _kernel.constants().items():
        if name not in expected:
            expected[name] = getattr(op if hasattr(op, name) else newton, name)
        assert number == expected[name], name
