"""The CPU kernel reads near keys as the definition in PyTorch does: values, gradients, layouts, padding, batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from lotformer.nn import NearKeys
from lotformer.ops import cpu
from support.cpu_kernel import assert_agrees, needs_kernel

pytestmark = needs_kernel


@dataclass(frozen=True)
class Problem:
    kind: Any = "2d"
    size: int = 3
    prefix: int = 1
    grid: tuple[int, int] = (5, 7)
    batch: int = 2
    heads: int = 2
    dim: int = 16
    value_dim: int = 16
    masked: bool = False
    by_head: bool = False  # in memory
    seed: int = 0


problems = st.builds(
    Problem,
    kind=st.sampled_from(["1d", "2d"]),
    size=st.sampled_from([1, 3, 5, 7, 9, 25, 41, 129]),
    prefix=st.sampled_from([0, 0, 1, 3]),
    grid=st.tuples(st.integers(1, 18), st.integers(1, 18)),
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    dim=st.integers(1, 70),
    value_dim=st.integers(1, 70) | st.sampled_from([16, 32, 64]),
    masked=st.booleans(),
    by_head=st.booleans(),
    seed=st.integers(0, 99),
)
TYPICAL = Problem(size=5, grid=(9, 8), dim=64, value_dim=64)
TEXT = Problem(kind="1d", size=5, prefix=0, grid=(1, 300), dim=32, value_dim=32)
"""Few keys for each query: the kernel takes several queries at a time."""
WIDE = replace(TEXT, size=129)
"""Many keys for each query: scores are matrix products."""


def build(p: Problem) -> tuple[NearKeys, dict[str, Tensor], dict[str, Any]]:
    """Tokens in fp64 and the other arguments."""
    torch.manual_seed(p.seed)
    near = NearKeys(p.heads, p.dim, p.kind, p.size)
    for parameter in near.parameters():
        torch.nn.init.normal_(parameter)
    length = p.grid[0] * p.grid[1]

    def tokens(count: int, width: int) -> Tensor:
        if p.by_head:
            return torch.randn(p.batch, p.heads, count, width).double()
        return torch.randn(p.batch, count, p.heads, width).double().transpose(1, 2)

    x = {
        "q": tokens(length, p.dim),
        "k": tokens(p.prefix + length, p.dim),
        "v": tokens(p.prefix + length, p.value_dim),
    }
    rest: dict[str, Any] = {"grid": p.grid}
    if p.masked:
        rest["key_mask"] = torch.rand(p.batch, p.prefix + length) < 0.6
        rest["query_mask"] = torch.rand(p.batch, length) < 0.7
    return near, x, rest


def run(near: NearKeys, x: dict[str, Tensor], rest: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """What is read, its share and the gradients of everything; in fp64 it is the definition."""
    near = near.double() if dtype == torch.float64 else near.float()
    leaves = {name: t.to(dtype).detach().requires_grad_() for name, t in x.items()}
    assert (cpu.near.why_unsupported(*leaves.values()) is None) == (dtype != torch.float64)
    out, share = near(**leaves, **rest)
    if "query_mask" in rest:
        share = share * rest["query_mask"][:, None]
    cotangents = [torch.arange(y.numel()).sin().bfloat16().to(y.dtype).view(y.shape) for y in (out, share)]
    wanted = leaves | dict(near.named_parameters())
    grads = torch.autograd.grad([out, share], list(wanted.values()), cotangents)
    found = {"out": out.detach(), "share": share.detach()}
    return found | {f"grad of {name}": g for name, g in zip(wanted, grads, strict=True)}


@given(problems)
@example(TYPICAL)
@example(TEXT)
@example(replace(TEXT, prefix=2, masked=True, dim=37, value_dim=50))
@example(Problem(grid=(33, 31), masked=True))
@example(WIDE)
@example(replace(WIDE, masked=True, grid=(1, 271), dim=37, value_dim=64))
@example(replace(WIDE, size=25, grid=(1, 33), by_head=True, value_dim=16))
def test_values_and_gradients_agree_with_the_definition(p: Problem) -> None:
    near, x, rest = build(p)
    got = run(near, x, rest, torch.float32)
    assert_agrees(got, run(near, x, rest, torch.float64), 1e-5, floor=1e-2)


@pytest.mark.parametrize("isa", cpu.instruction_sets())
def test_every_instruction_set_agrees(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOTFORMER_CPU_ISA", isa)
    for p in (TYPICAL, TEXT, replace(TEXT, size=3, masked=True), replace(TEXT, dim=19, value_dim=21, masked=True),
              WIDE, replace(WIDE, size=31, dim=19, masked=True)):  # fmt: skip
        near, x, rest = build(p)
        assert_agrees(run(near, x, rest, torch.float32), run(near, x, rest, torch.float64), 1e-5)


def test_bf16_is_as_good_as_its_numbers() -> None:
    for p in (TYPICAL, TEXT, Problem(dim=19, value_dim=5, masked=True)):
        near, x, rest = build(p)
        x = {name: t.bfloat16().double() for name, t in x.items()}
        got = {name: t.float() for name, t in run(near, x, rest, torch.bfloat16).items()}
        assert_agrees(got, run(near, x, rest, torch.float64), 1e-2)


@pytest.mark.parametrize(
    "p", [Problem(masked=True, prefix=2), replace(TEXT, masked=True, prefix=2), replace(WIDE, masked=True)]
)
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), 1e30])
def test_the_contents_of_padding_never_matter(junk: float, p: Problem) -> None:
    near, x, rest = build(p)
    clean = run(near, x, rest, torch.float32)
    masks = {"q": rest["query_mask"], "k": rest["key_mask"], "v": rest["key_mask"]}
    dirty = {name: t.masked_fill(~masks[name][:, None, :, None], junk) for name, t in x.items()}
    for name, found in run(near, dirty, rest, torch.float32).items():
        assert torch.equal(found, clean[name]), name
    defined = run(near, dirty, rest, torch.float64)
    assert all(t.isfinite().all() for t in defined.values())


def test_a_query_without_a_key_reads_nothing() -> None:
    near, x, rest = build(Problem(kind="1d", size=1))
    mask = torch.ones(2, 36, dtype=torch.bool)
    mask[0, [0, 5]] = mask[1] = False
    for dtype in (torch.float32, torch.float64):
        found = run(near, x, rest | {"key_mask": mask}, dtype)
        assert all(t.isfinite().all() for t in found.values())
        assert found["out"][0, :, 4].abs().max() == found["out"][1].abs().max() == 0
        assert found["share"][0, :, 4].max() == found["share"][1].max() == 0
        assert found["share"][0, :, 5].min() > 0


@pytest.mark.parametrize("p", [Problem(batch=3, grid=(20, 30), size=5, masked=True), replace(TEXT, batch=3)])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_batch_is_its_samples_one_by_one(threads: int, p: Problem) -> None:
    torch.set_num_threads(threads)
    near, x, rest = build(p)
    x = {name: t.float() for name, t in x.items()}
    together = run(near, x, rest, torch.float32)
    for b in range(3):
        own = {name: t[b : b + 1] if name != "grid" else t for name, t in rest.items()}
        alone = run(near, {name: t[b : b + 1] for name, t in x.items()}, own, torch.float32)
        for name in ("out", "share"):
            assert torch.equal(alone[name], together[name][b : b + 1]), name


@pytest.mark.parametrize("isa", cpu.instruction_sets())
def test_scores_of_any_size_are_compared(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them may lie below what stands for no score at all."""
    monkeypatch.setenv("LOTFORMER_CPU_ISA", isa)
    near, x, rest = build(TEXT)
    x = {"q": -x["q"].abs() * 1e31, "k": x["k"].abs(), "v": x["v"]}
    got = near(**{name: t.float() for name, t in x.items()}, **rest)[0]
    torch.testing.assert_close(got.double(), near.double()(**x, **rest)[0], rtol=1e-5, atol=1e-5)


def test_padding_behind_a_text_changes_nothing() -> None:
    near, x, rest = build(TEXT)
    longer = {name: torch.cat([t, torch.full_like(t[:, :, :21], float("nan"))], 2).float() for name, t in x.items()}
    mask = torch.arange(321).expand(2, -1) < 300
    out, share = near(**longer, key_mask=mask, query_mask=mask, grid=(1, 321))
    alone, alone_share = near(**{name: t.float() for name, t in x.items()}, **rest)
    # the mean key and the number of keys are sums over other lengths: equal to rounding
    torch.testing.assert_close(out[:, :, :300], alone, rtol=0, atol=0)
    torch.testing.assert_close(share[:, :, :300], alone_share)


def test_memory_that_overlaps_is_read() -> None:
    near, x, rest = build(TYPICAL)
    once = {name: t[:, :1].float() for name, t in x.items()}
    got = near(**{name: t.expand(-1, 2, -1, -1) for name, t in once.items()}, **rest)
    expected = near(**{name: t.repeat(1, 2, 1, 1) for name, t in once.items()}, **rest)
    torch.testing.assert_close(got, expected)


def test_only_one_result_may_matter() -> None:
    near, x, rest = build(TYPICAL)
    for which in (0, 1):
        grads = []
        for dtype in (torch.float32, torch.float64):
            leaves = [t.to(dtype).detach().requires_grad_() for t in x.values()]
            y = near.to(dtype)(*leaves, **rest)[which].sin().sum()
            grads.append(torch.autograd.grad(y, leaves, allow_unused=True, materialize_grads=True))
        for got, expected in zip(*grads, strict=True):
            torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-6)


def test_there_is_no_second_derivative() -> None:
    near, x, rest = build(Problem())
    q = x["q"].float().requires_grad_()
    out, _ = near(q, x["k"].float(), x["v"].float(), **rest)
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        grad.sum().backward()


def test_the_registration_passes_opcheck() -> None:
    _, x, rest = build(Problem(masked=True, value_dim=5))
    tokens = [t.float().requires_grad_() for t in x.values()]
    direction, offset = torch.randn(2, 2, 16, requires_grad=True), torch.randn(2, 2, requires_grad=True)
    for masks in ((None, None), (rest["query_mask"], rest["key_mask"])):
        arguments = (*tokens, direction, offset, *masks, rest["grid"][1], 1, 1)
        torch.library.opcheck(torch.ops.lotformer.near_forward.default, arguments)
