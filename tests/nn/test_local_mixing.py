"""Local mixing behind a prefix: the native operator is the definition in one pass."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lotformer.nn import DepthwiseMixing
from lotformer.ops import cpu
from support.agreement import assert_native_agrees, in_layout, with_gradients
from support.cpu_kernel import needs_kernel

LAYOUTS = ("heads", "tokens", "wide")


def mixing(heads: int, dim: int, kind: str, size: int, sharing: str = "none") -> DepthwiseMixing:
    channels = {"none": heads * dim, "heads": dim, "channels": heads}[sharing]
    return DepthwiseMixing(channels, kind, size, sharing=sharing)  # type: ignore[arg-type]


class Case:
    """Everything that is joined, and the function that joins it."""

    def __init__(
        self, batch=2, heads=3, prefix=1, grid=(5, 7), dim=16, kind="2d", size=3, sharing="none", masked=False
    ) -> None:
        length = grid[0] * grid[1]
        self.module = mixing(heads, dim, kind, size, sharing)
        self.grid = grid if kind == "2d" else None
        self.rows = torch.randn(batch, heads, prefix, dim) if prefix else None
        self.out = torch.randn(batch, heads, length, dim)
        self.v = torch.randn(batch, heads, prefix + length, dim)
        self.key_mask = torch.rand(batch, prefix + length) < 0.7 if masked else None
        self.query_mask = torch.rand(batch, prefix + length) < 0.7 if masked else None

    @property
    def inputs(self) -> list[Tensor | None]:
        return [self.rows, self.out, self.v, self.module.conv.weight]

    def joined(self, rows: Tensor | None, out: Tensor, v: Tensor, weight: Tensor, backend: str | None = None) -> Tensor:
        module = self.module
        if weight is not module.conv.weight:
            module = DepthwiseMixing(module.conv.in_channels, module.kind, weight.shape[-1], sharing=module.sharing)
            del module.conv.weight
            module.conv.weight = weight  # not a parameter: gradients flow on
        return module.joined(rows, out, v, self.key_mask, self.query_mask, self.grid, backend=backend)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    torch.manual_seed(draw(st.integers(0, 99)))
    kind = draw(st.sampled_from(["1d", "2d"]))
    grid = (draw(st.integers(1, 9)), draw(st.integers(1, 20)))
    case = Case(
        batch=draw(st.integers(1, 3)),
        heads=draw(st.integers(1, 3)),
        prefix=draw(st.integers(0, 3)),
        grid=grid,
        dim=draw(st.sampled_from([1, 3, 8, 13, 16, 20, 64, 67, 80])),
        kind=kind,
        size=draw(st.sampled_from([1, 3, 5, 9])),
        sharing=draw(st.sampled_from(["none", "heads"])),
        masked=draw(st.booleans()),
    )
    case.v = in_layout(case.v, draw(st.sampled_from(LAYOUTS)))
    case.out = in_layout(case.out, draw(st.sampled_from(LAYOUTS)))
    return case


@needs_kernel
@given(cases())
def test_it_agrees_with_the_definition(case: Case) -> None:
    assert cpu.joining.why_unsupported(*case.inputs) is None
    assert_native_agrees(case.joined, case.inputs)


@needs_kernel
@pytest.mark.parametrize("isa", cpu.instruction_sets())
def test_every_instruction_set_agrees(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOTFORMER_CPU_ISA", isa)
    for dim in (5, 64, 91):
        case = Case(dim=dim, masked=True)
        assert_native_agrees(case.joined, case.inputs)


@needs_kernel
@pytest.mark.parametrize("kind", ["1d", "2d"])
@pytest.mark.parametrize("sharing", ["none", "heads"])
def test_mixing_alone_agrees(kind: str, sharing: str) -> None:
    module = mixing(2, 12, kind, 5, sharing)
    twin = mixing(2, 12, kind, 5, sharing).double()
    twin.load_state_dict(module.state_dict())
    v = torch.randn(3, 2, 36, 12)

    def mixed(x: Tensor) -> Tensor:
        return (module if x.dtype == torch.float32 else twin)(x)

    assert_native_agrees(mixed, [v])


@needs_kernel
def test_what_padding_holds_does_not_spread() -> None:
    case = Case(masked=True)
    clean = with_gradients(case.joined, case.inputs, torch.float32)
    case.v[~case.key_mask[:, None, :, None].expand_as(case.v)] = torch.nan
    case.rows[~case.query_mask[:, None, :1, None].expand_as(case.rows)] = torch.nan
    for have, want in zip(with_gradients(case.joined, case.inputs, torch.float32), clean, strict=True):
        assert torch.equal(have, want)


@needs_kernel
def test_a_sample_does_not_depend_on_its_batch() -> None:
    case = Case(batch=3, grid=(14, 14), dim=64)
    together = case.joined(*case.inputs)
    for b in range(3):
        alone = case.joined(case.rows[b : b + 1], case.out[b : b + 1], case.v[b : b + 1], case.module.conv.weight)
        assert torch.equal(alone, together[b : b + 1])


@needs_kernel
def test_gradients_are_the_same_whatever_the_threads() -> None:
    case = Case(batch=3, grid=(14, 14), dim=64)
    first = with_gradients(case.joined, case.inputs, torch.float32)
    torch.set_num_threads(2)
    for have, want in zip(with_gradients(case.joined, case.inputs, torch.float32), first, strict=True):
        assert torch.equal(have, want)


@needs_kernel
def test_the_output_lies_as_a_layer_wants_it() -> None:
    case = Case()
    case.v = in_layout(case.v, "wide")
    assert case.joined(*case.inputs).transpose(1, 2).is_contiguous()


@needs_kernel
def test_it_has_a_second_derivative() -> None:
    case = Case(batch=1, heads=1, grid=(3, 4), dim=2, masked=True)

    def penalty(dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in case.inputs]
        out = case.joined(*leaves)
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))

    for have, want in zip(penalty(torch.float32), penalty(torch.float64), strict=True):
        torch.testing.assert_close(have.double(), want, rtol=1e-4, atol=1e-4)


@needs_kernel
def test_the_registration_passes_opcheck() -> None:
    case = Case(batch=2, heads=2, dim=5, masked=True)
    inputs = [None if x is None else x.detach().requires_grad_() for x in case.inputs]
    rows, out, v, weight = inputs
    torch.library.opcheck(
        torch.ops.lotformer.join_forward.default, (out, rows, v, weight, case.query_mask, case.key_mask, *case.grid)
    )


@needs_kernel
def test_it_compiles_into_one_graph_and_exports_without_the_kernel() -> None:
    case = Case()
    rows, out, v, _ = (None if x is None else x.detach() for x in case.inputs)

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixing = case.module

        def forward(self, rows: Tensor, out: Tensor, v: Tensor) -> Tensor:
            return self.mixing.joined(rows, out, v, grid=case.grid)

    module = Module()
    expected = module(rows, out, v)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(rows, out, v), expected)
    program = torch.export.export(module, (rows, out, v))
    assert "lotformer" not in str(program.graph)
    torch.testing.assert_close(program.module()(rows, out, v), expected)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_transforms_and_named_backends_use_the_definition(backend: str | None) -> None:
    case = Case(masked=True)
    expected = case.joined(*case.inputs, backend="reference")
    torch.testing.assert_close(case.joined(*case.inputs, backend=backend), expected)
    case.key_mask = case.query_mask = None
    one = torch.func.vmap(lambda v: case.joined(case.rows[:1], case.out[:1], v[None], case.module.conv.weight)[0])
    assert one(case.v).shape == case.v.shape


@pytest.mark.parametrize("kind", ["1d", "2d"])
def test_a_prefix_without_tokens_behind_it_is_handed_on(kind: str) -> None:
    rows, v = torch.randn(2, 3, 2, 1, 4)
    assert torch.equal(mixing(2, 4, kind, 3).joined(rows, torch.zeros(3, 2, 0, 4), v), rows)


@needs_kernel
def test_a_counter_of_products_sees_the_convolution() -> None:
    case = Case()
    with FlopCounterMode(display=False) as counter:
        case.joined(*case.inputs)
    assert counter.get_total_flops() == 2 * case.out.numel() * 9


@needs_kernel
def test_wrong_shapes_are_refused() -> None:
    case = Case()
    with pytest.raises(RuntimeError, match="do not make"):
        cpu.joining.run(case.out, case.rows, case.v, case.module.conv.weight, None, None, (5, 8))
    with pytest.raises(RuntimeError, match="coupled"):
        cpu.joining.run(case.out[:, :, 1:], case.rows, case.v, case.module.conv.weight, None, None, (5, 7))
    with pytest.raises(RuntimeError, match="filters"):
        cpu.joining.run(case.out, case.rows, case.v, case.module.conv.weight[:7], None, None, (5, 7))
