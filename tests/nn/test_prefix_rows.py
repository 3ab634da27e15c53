"""Polarised rows of a prefix: the native operator is the definition in one pass."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lotformer.nn import PrefixRows
from lotformer.ops import cpu
from support.agreement import assert_native_agrees, in_layout, with_gradients
from support.cpu_kernel import needs_kernel

POWERS = ((1.0, 0.5), (0.5, 1.0), (0.7, 2.0), (3.0, 1.0))


class Case:
    """Special queries, all keys and values, and the function that pools them."""

    def __init__(
        self, batch=2, heads=3, prefix=2, length=37, dim=16, value_dim=16, powers=(1.0, 0.5), masked=False
    ) -> None:
        self.module = PrefixRows(dim**-0.5, polarize=True, powers=powers)  # moderate scores: both can be right
        self.q = torch.randn(batch, heads, prefix, dim)
        self.k = torch.randn(batch, heads, length, dim)
        self.v = torch.randn(batch, heads, length, value_dim)
        self.mask = torch.rand(batch, length) < 0.7 if masked else None

    @property
    def inputs(self) -> list[Tensor | None]:
        return [self.q, self.k, self.v]

    def pooled(self, q: Tensor, k: Tensor, v: Tensor, backend: str | None = None) -> Tensor:
        return self.module(q, k, v, self.mask, backend=backend)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    torch.manual_seed(draw(st.integers(0, 99)))
    width = st.sampled_from([1, 3, 8, 13, 16, 32, 67])
    case = Case(
        batch=draw(st.integers(1, 3)),
        heads=draw(st.integers(1, 3)),
        prefix=draw(st.integers(1, 3)),
        length=draw(st.sampled_from([1, 5, 16, 33, 128, 129, 300])),
        dim=draw(width),
        value_dim=draw(width),
        powers=draw(st.sampled_from(POWERS)),
        masked=draw(st.booleans()),
    )
    case.k, case.v = (in_layout(x, draw(st.sampled_from(("heads", "tokens", "wide")))) for x in (case.k, case.v))
    return case


@needs_kernel
@given(cases())
def test_it_agrees_with_the_definition(case: Case) -> None:
    reason = cpu.pooling.why_unsupported(*case.inputs)
    assert reason is None
    assert_native_agrees(case.pooled, case.inputs, 2e-5)  # a root of a small score has a steep slope


@needs_kernel
@pytest.mark.parametrize("isa", cpu.instruction_sets())
def test_every_instruction_set_agrees(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOTFORMER_CPU_ISA", isa)
    for dim in (5, 64):
        case = Case(dim=dim, value_dim=dim + 3, length=200, masked=True)
        assert_native_agrees(case.pooled, case.inputs, 2e-5)


@needs_kernel
def test_zeros_have_the_slope_of_the_definition() -> None:
    case = Case()
    case.q[..., ::2], case.k[..., ::3], case.k[:, :, 5] = 0.0, 0.0, 0.0
    assert_native_agrees(case.pooled, case.inputs, 2e-5)


@needs_kernel
def test_what_padding_holds_does_not_spread() -> None:
    case = Case(masked=True, length=200)
    clean = with_gradients(case.pooled, case.inputs, torch.float32)
    padding = ~case.mask[:, None, :, None]
    case.k, case.v = case.k.masked_fill(padding, torch.nan), case.v.masked_fill(padding, torch.inf)
    for have, want in zip(with_gradients(case.pooled, case.inputs, torch.float32), clean, strict=True):
        assert torch.equal(have, want)


@needs_kernel
def test_a_sample_without_keys_is_zero() -> None:
    case = Case(masked=True)
    case.mask[0] = False
    out, dq, dk, dv = with_gradients(case.pooled, case.inputs, torch.float32)
    assert all(not x[0].any() for x in (out, dq, dk, dv))
    assert out[1].any()


@needs_kernel
def test_large_scores_stay_finite() -> None:
    case = Case(length=300)
    case.q, case.k = 100 * case.q, 100 * case.k
    for x in with_gradients(case.pooled, case.inputs, torch.float32):
        assert x.isfinite().all()


@needs_kernel
def test_a_sample_does_not_depend_on_its_batch_nor_on_the_threads() -> None:
    case = Case(batch=3, length=300)
    together = with_gradients(case.pooled, case.inputs, torch.float32)
    torch.set_num_threads(2)
    for have, want in zip(with_gradients(case.pooled, case.inputs, torch.float32), together, strict=True):
        assert torch.equal(have, want)
    torch.set_num_threads(1)
    for b in range(3):
        alone = case.pooled(case.q[b : b + 1], case.k[b : b + 1], case.v[b : b + 1])
        assert torch.equal(alone, together[0][b : b + 1])


@needs_kernel
def test_the_registration_passes_opcheck() -> None:
    case = Case(masked=True)
    inputs = [x.requires_grad_() for x in case.inputs if x is not None]
    torch.library.opcheck(torch.ops.lotformer.pool_forward.default, (*inputs, case.mask, 0.3, 1.0, 0.5))


@needs_kernel
def test_it_compiles_into_one_graph_and_exports_without_the_kernel() -> None:
    case = Case()
    expected = case.pooled(*case.inputs)
    compiled = torch.compile(case.pooled, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*case.inputs), expected)
    program = torch.export.export(case.module, tuple(case.inputs))
    assert "lotformer" not in str(program.graph)
    torch.testing.assert_close(program.module()(*case.inputs), expected)


@needs_kernel
def test_a_second_derivative_is_refused_with_advice() -> None:
    case = Case()
    inputs = [x.requires_grad_() for x in case.inputs if x is not None]
    (first,) = torch.autograd.grad(case.pooled(*inputs).sum(), inputs[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="reference"):
        first.sum().backward()
    (first,) = torch.autograd.grad(case.pooled(*inputs, backend="reference").sum(), inputs[:1], create_graph=True)
    first.sum().backward()


def test_transforms_use_the_definition() -> None:
    case = Case()
    rows = torch.func.vmap(lambda q: case.pooled(q[None], case.k[:1], case.v[:1])[0])(case.q)
    torch.testing.assert_close(rows[:1], case.pooled(case.q[:1], case.k[:1], case.v[:1]))
