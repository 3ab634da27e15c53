"""The CPU kernel reads found groups as the definition in PyTorch does: values, gradients, layouts, threads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from lotformer.ops import Grouping, cpu, found_attention
from support.cpu_kernel import assert_agrees, needs_kernel
from support.found import Built, Problem, attend, build, problems, with_gradients

pytestmark = needs_kernel

IMAGE = Problem(rank=64, grid=(21, 23), reach=(4, 4), dim=64, value_dim=64)
TEXT = Problem(rank=32, grid=(1, 300), window="1d", reach=(0, 64), prefix=0, dim=32, value_dim=32)
ALL = Problem(rank=19, grid=(1, 200), window=None, more_keys=77, prefix=2, dim=37, value_dim=50)


def assert_kernel_agrees(b: Built, tolerance: float = 2e-5) -> None:
    got, groups = with_gradients(b, torch.float32, backend="cpu")
    expected, same = with_gradients(b, torch.float64, backend="reference", groups=groups)
    assert torch.equal(groups, same)
    assert_agrees(got, expected, tolerance, floor=0.1)


@given(problems)
@example(IMAGE)
@example(replace(IMAGE, masked=True, grid=(33, 31), rank=17))
@example(replace(IMAGE, grid=(2, 70), reach=(0, 3), corrected=False))
@example(TEXT)
@example(replace(TEXT, masked=True, dim=37, value_dim=50))
@example(replace(TEXT, batch=1, heads=1, grid=(1, 1)))
@example(ALL)
@example(replace(ALL, masked=True, by_head=True, rank=256, grid=(1, 300)))
def test_values_and_gradients_agree_with_the_definition(p: Problem) -> None:
    assert_kernel_agrees(build(p))


@pytest.mark.parametrize("isa", cpu.instruction_sets())
def test_every_instruction_set_agrees(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOTFORMER_CPU_ISA", isa)
    for p in (IMAGE, replace(IMAGE, masked=True, dim=19, value_dim=21), TEXT, replace(TEXT, masked=True), ALL):
        assert_kernel_agrees(build(p))


@given(st.builds(replace, problems, heaviest=st.integers(1, 5), most=st.integers(1, 40)))
@example(replace(IMAGE, heaviest=2, most=12, masked=True))
@example(replace(TEXT, heaviest=3, most=30))
@example(replace(ALL, heaviest=8, most=500, masked=True, by_head=True))
def test_keys_by_content_are_read_as_by_the_definition(p: Problem) -> None:
    assert_content_agrees(build(p))


def assert_content_agrees(b: Built) -> None:
    got = attend(b, {name: t.float() for name, t in b.x.items()}, backend="cpu")
    expected = attend(b, groups=got.groups, backend="reference")
    torch.testing.assert_close(got.out.double(), expected.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.share.double(), expected.share, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("isa", cpu.instruction_sets())
def test_every_instruction_set_reads_keys_by_content(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOTFORMER_CPU_ISA", isa)
    for p in (replace(IMAGE, heaviest=2, most=12), replace(TEXT, heaviest=1, most=30, masked=True)):
        assert_content_agrees(build(p))


@pytest.mark.parametrize(
    "p", [IMAGE, TEXT, ALL, replace(TEXT, batch=1, heads=1), replace(TEXT, heaviest=2, most=9)], ids=str
)
def test_threads_change_nothing(p: Problem) -> None:
    b = build(replace(p, masked=True))
    results = []
    for threads in (1, 2, 5, 16):
        torch.set_num_threads(threads)
        results.append(with_gradients(b, torch.float32, backend=None if p.heaviest else "cpu"))
    torch.set_num_threads(1)
    for found, groups in results[1:]:
        assert torch.equal(groups, results[0][1])
        assert all(torch.equal(t, results[0][0][name]) for name, t in found.items())


def test_memory_that_overlaps_or_is_not_aligned_is_read() -> None:
    b = build(replace(TEXT, grid=(1, 70)))
    x = {name: t.float() for name, t in b.x.items()}
    tokens = {name: x[name] for name in ("q", "k", "v")}
    wide = {name: t[:, :1].expand(-1, 2, -1, -1) for name, t in tokens.items()}
    dense = {name: t.contiguous() for name, t in wide.items()}
    assert torch.equal(attend(b, x | wide).out, attend(b, x | dense).out)
    odd = {name: torch.nn.functional.pad(t, (1, 2))[..., 1:-2] if t.dim() == 4 else t for name, t in x.items()}
    assert torch.equal(attend(b, odd).out, attend(b, x).out)


@pytest.mark.parametrize("isa", cpu.instruction_sets())
def test_scores_of_any_size_are_compared(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOTFORMER_CPU_ISA", isa)
    b = build(replace(TEXT, corrected=False, grid=(1, 90)))
    b.x = {"q": -b.x["q"].abs() * 1e31, "k": b.x["k"].abs(), "v": b.x["v"]}
    got = attend(b, {name: t.float() for name, t in b.x.items()}, backend="cpu")
    expected = attend(b, {name: t.float().double() for name, t in b.x.items()}, groups=got.groups, backend="reference")
    torch.testing.assert_close(got.out.double(), expected.out, rtol=1e-5, atol=1e-5)


def test_groups_that_are_none_are_read_by_nobody() -> None:
    """Whatever integers are given, no memory but the keys' is touched."""
    b = build(Problem(window=None, corrected=False))
    x = {name: t.float() for name, t in b.x.items()}
    groups = torch.randint(-3, 9, (2, 2, 28))
    got = attend(b, x, groups=groups, backend="cpu")
    inside = groups.masked_fill((groups < 0) | (groups > 5), 5)
    assert torch.equal(got.groups, inside)
    torch.testing.assert_close(got.out, attend(b, x, groups=inside, backend="reference").out)


def test_there_is_no_second_derivative() -> None:
    b = build(Problem())
    q = b.x["q"].float().requires_grad_()
    out = found_attention(q, b.x["k"].float(), b.x["v"].float(), b.problem.grouping).out
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        grad.sum().backward()


def test_the_registration_passes_opcheck() -> None:
    b = build(Problem(masked=True, value_dim=5))
    tensors = [t.float().requires_grad_() for t in b.x.values()]
    missing = (*tensors[:3], None, None, None, None, None, None)
    for arguments in ((*tensors, *b.masks.values(), None), missing):
        rest = (1, 5, 2, 0, 0, 7, 1, 2)
        torch.library.opcheck(torch.ops.lotformer.found_forward.default, (*arguments, *rest))


def test_it_compiles_without_a_break() -> None:
    b = build(TEXT)
    x = {name: t.float() for name, t in b.x.items()}

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return found_attention(q, k, v, Grouping(8)).out

    compiled = torch.compile(attended, backend="aot_eager", fullgraph=True)
    tokens = [x[name] for name in ("q", "k", "v")]
    torch.testing.assert_close(compiled(*tokens), attended(*tokens))
