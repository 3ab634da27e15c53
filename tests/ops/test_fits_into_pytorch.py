"""Promise 5: compile, export, ONNX, autocast, functorch, state dicts, copies and pickles all work."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import onnxruntime
import pytest
import torch
import torch._dynamo.testing
from torch import nn

import lotformer
from support.problems import lengths_mask, make_inputs

SOLVERS = ["sinkhorn", "newton"]


def small_layer(**options) -> lotformer.LOTAttention:
    return lotformer.LOTAttention(16, num_heads=2, rank=4, **options).eval()


@pytest.mark.parametrize("solver", SOLVERS)
def test_compiles_to_one_graph_forward_and_backward(solver):
    x = make_inputs(2, 2, 21, rank=4, dtype=torch.float32, requires_grad=True)
    mask = lengths_mask([21, 9], 21)

    def operator(*inputs):
        return lotformer.lot_attention(*inputs, eps=0.3, solver=solver, query_mask=mask, key_mask=mask)

    expected = operator(*x)
    got = torch.compile(operator, fullgraph=True)(*x)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    cotangent = torch.randn_like(expected)
    for mine, theirs in zip(
        torch.autograd.grad(got, x, cotangent), torch.autograd.grad(expected, x, cotangent), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("pivots", ["fixed", "input-aware"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_exports_with_a_dynamic_sequence(solver, pivots):
    layer = small_layer(solver=solver, prefix_tokens=1, local_conv="1d", pivots=pivots)
    length = torch.export.Dim("length", min=4, max=512)
    program = torch.export.export(layer, (torch.randn(2, 17, 16),), dynamic_shapes=({1: length},))
    for n in (5, 31):
        x = torch.randn(2, n, 16)
        torch.testing.assert_close(program.module()(x), layer(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("key_masses", ["linear", "query-aware"])
def test_a_converted_encoder_exports_with_as_many_tokens_as_heads(key_masses):
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    lotformer.convert(encoder, rank=4, key_masses=key_masses)
    length = torch.export.Dim("length", min=2, max=512)
    program = torch.export.export(encoder, (torch.randn(2, 17, 16),), dynamic_shapes=({1: length},))
    for n in (4, 9):
        x = torch.randn(2, n, 16)
        torch.testing.assert_close(program.module()(x), encoder(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("solver", SOLVERS)
def test_runs_in_onnxruntime_with_a_dynamic_sequence(solver):
    layer = small_layer(solver=solver, key_masses="query-aware", local_conv="1d", eps=0.3)
    length = torch.export.Dim("length", min=2, max=512)
    program = torch.onnx.export(
        layer, (torch.randn(2, 17, 16),), dynamic_shapes=({1: length},), dynamo=True, verbose=False
    )
    buffer = io.BytesIO()
    program.save(buffer)
    session = onnxruntime.InferenceSession(buffer.getvalue(), providers=["CPUExecutionProvider"])
    for n in (2, 29):
        x = torch.randn(2, n, 16)
        (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        np.testing.assert_allclose(got, layer(x).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_a_layer_with_input_aware_pivots_compiles_whole():
    layer = small_layer(solver="newton", pivots="input-aware", key_masses="query-aware")
    x, mask = torch.randn(2, 17, 16), torch.arange(17) < torch.tensor([[17], [9]])
    got = torch.compile(layer, fullgraph=True)(x, mask=mask)
    torch.testing.assert_close(got, layer(x, mask=mask), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("solver", SOLVERS)
def test_autocast_keeps_the_solve_in_fp32(solver):
    layer = small_layer(solver=solver, eps=0.1)
    x = torch.randn(2, 33, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
        q, k = torch.randn(2, 1, 2, 50, 8, dtype=torch.bfloat16)
        plan = layer.mechanism.coupling(q, k)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), layer(x), rtol=0.1, atol=0.05)
    assert plan.query_plan.dtype == torch.float32
    torch.testing.assert_close(plan.row_sums(), torch.ones(1, 2, 50))
    if solver == "newton":
        assert plan.residual().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_inputs_give_half_outputs_near_the_full_ones(dtype):
    x = make_inputs(1, 2, 40, dtype=torch.float32)
    half = lotformer.lot_attention(*(t.to(dtype) for t in x[:3]), *x[3:])
    assert half.dtype == dtype
    torch.testing.assert_close(half.float(), lotformer.lot_attention(*x), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("solver", SOLVERS)
def test_vmap_and_functional_call(solver):
    layer = small_layer(solver=solver, eps=0.5)
    x = torch.randn(3, 2, 9, 16)
    mapped = torch.func.vmap(layer)(x)
    torch.testing.assert_close(mapped, torch.stack([layer(t) for t in x]), rtol=1e-4, atol=1e-5)
    doubled = {name: 2 * p for name, p in layer.named_parameters()}
    other = copy.deepcopy(layer)
    other.load_state_dict(doubled, strict=False)
    torch.testing.assert_close(torch.func.functional_call(layer, doubled, (x[0],)), other(x[0]))


def test_per_sample_gradients_by_vmap_equal_gradients_one_by_one():
    layer = small_layer()
    params = dict(layer.named_parameters())

    def loss(params, sample):
        return torch.func.functional_call(layer, params, (sample[None],)).square().sum()

    x = torch.randn(3, 7, 16)
    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x)
    for b in range(3):
        alone = torch.func.grad(loss)(params, x[b])
        for name, grad in alone.items():
            torch.testing.assert_close(per_sample[name][b], grad, rtol=1e-4, atol=1e-5)


def test_state_dict_deepcopy_and_pickle_round_trips_are_exact():
    layer = small_layer(prefix_tokens=1, polarize_prefix=True, local_conv="2d", key_masses="linear", learn_eps=True)
    x = torch.randn(2, 10, 16)
    fresh = small_layer(prefix_tokens=1, polarize_prefix=True, local_conv="2d", key_masses="linear", learn_eps=True)
    fresh.load_state_dict(layer.state_dict())
    for twin in (fresh, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x), layer(x))


def test_a_coupling_can_be_pickled():
    plan = lotformer.coupling(*make_inputs(1, 1, 5).without_values)
    assert torch.equal(pickle.loads(pickle.dumps(plan)).dense(), plan.dense())


@pytest.mark.parametrize("solver", SOLVERS)
def test_one_compiled_graph_serves_every_length(solver):
    layer = small_layer(solver=solver)
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(layer, backend=counter, dynamic=True, fullgraph=True)
    for n in (9, 17, 33):
        x = torch.randn(2, n, 16)
        torch.testing.assert_close(compiled(x), layer(x), rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1
