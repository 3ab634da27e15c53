"""Windows fit into PyTorch: compiled, exported, in ONNX, under `vmap` and autocast; alone and in a converted ViT."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from torch import nn

import lotformer

KINDS = {
    "1d": {"window": "1d", "prefix_tokens": 1},
    "text": {"window": "1d", "prefix_tokens": 0, "window_size": 5},
    "2d": {"window": "2d", "prefix_tokens": 1, "window_size": 5},
}


@pytest.fixture(autouse=True)
def nothing_compiled():
    """PyTorch compiles a layer's code anew at most eight times in a process, whichever test asks."""
    torch._dynamo.reset()


def layer(kind: str) -> nn.Module:
    options: dict[str, Any] = {"iters": 1, "pivots": "input-aware", "key_masses": "query-aware"}
    return lotformer.LOTAttention(16, 2, rank=4, **options, **KINDS[kind]).eval()  # type: ignore[arg-type]


def vit() -> nn.Module:
    model = timm.models.vision_transformer.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=3
    ).eval()
    lotformer.convert(model, rank=4, solver="sinkhorn", iters=1)
    assert any("near." in name for name, _ in model.named_parameters())  # a window is the default here
    return model


def onnx(model: nn.Module, x: torch.Tensor, **options: Any) -> onnxruntime.InferenceSession:
    buffer = io.BytesIO()
    program = torch.onnx.export(model, (x,), dynamo=True, verbose=False, **options)
    assert program is not None
    program.save(buffer)
    return onnxruntime.InferenceSession(buffer.getvalue(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_compiles_whole_with_gradients(kind: str) -> None:
    attention = layer(kind)
    x, mask = torch.randn(2, 17, 16, requires_grad=True), torch.arange(17) < torch.tensor([[17], [9]])
    results = []
    for function in (attention, torch.compile(attention, fullgraph=True, backend="aot_eager")):
        out = function(x, mask=mask)
        wanted = [x, *(p for p in attention.parameters() if p.requires_grad)]
        results.append((out, *torch.autograd.grad(out.square().sum(), wanted)))
    for plain, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_layer_takes_sequences_of_several_lengths(kind: str) -> None:
    attention = layer(kind)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for n in (10, 17, 26, 50):
        x = torch.randn(2, n, 16)
        torch.testing.assert_close(compiled(x), attention(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_exports_without_our_kernels(kind: str) -> None:
    attention = layer(kind)
    shapes = {"dynamic_shapes": ({1: torch.export.Dim("length", min=4, max=512)},)} if kind == "1d" else {}
    program = torch.export.export(attention, (torch.randn(2, 26, 16),), **shapes)
    assert "lotformer." not in str(program.graph)
    for n in (5, 26, 40) if shapes else (26,):
        x = torch.randn(2, n, 16)
        torch.testing.assert_close(program.module()(x), attention(x), rtol=1e-4, atol=1e-5)


def test_a_layer_runs_in_onnxruntime_with_a_dynamic_sequence() -> None:
    attention = layer("1d")
    length = torch.export.Dim("length", min=4, max=512)
    session = onnx(attention, torch.randn(2, 17, 16), dynamic_shapes=({1: length},))
    for n in (4, 29):
        x = torch.randn(2, n, 16)
        (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        np.testing.assert_allclose(got, attention(x).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_a_converted_vision_transformer_compiles_exports_and_runs_in_onnxruntime() -> None:
    model, x = vit(), torch.randn(2, 3, 32, 32)
    expected = model(x)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), expected, rtol=1e-4, atol=1e-5)
    session = onnx(model, x)
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    np.testing.assert_allclose(got, expected.detach().numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["1d", "2d"])
def test_vmap_and_autocast(kind: str) -> None:
    near = lotformer.nn.NearKeys(2, 8, kind)  # type: ignore[arg-type]
    q, k, v = torch.randn(3, 4, 2, 25, 8)
    expected = near(q, k, v)
    mapped = torch.func.vmap(lambda *x: tuple(y[0] for y in near(*(t[None] for t in x))))(q, k, v)
    torch.testing.assert_close(mapped, expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(near(q, k, v), expected, rtol=0, atol=0)
