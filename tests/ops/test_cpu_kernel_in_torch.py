"""The CPU kernel as a torch operator: tracing, compiling, exporting, instruction sets, and life without it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lotformer.ops import backends, cpu, lot_attention
from lotformer.ops.problem import SOLVERS
from support import forked
from support.cpu_kernel import FORMS, assert_agrees, needs_kernel, problem, run, scored


def inputs(**options: Any) -> dict[str, Tensor]:
    return {name: t.float().requires_grad_() for name, t in problem(n=21, m=17, **options).items()}


def in_new_process(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_kernel
@pytest.mark.parametrize(("solver", "balance"), [(0, 0), (1, 0), (1, 1), (0, 2)], ids=str)
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "masses, masks and eps"])
def test_the_registration_passes_opcheck(extras: bool, solver: int, balance: int) -> None:
    x = inputs()
    masses: list[Tensor | None] = [None, None]
    masks: list[Tensor | None] = [None, None]
    temperatures = None
    if extras:
        masses = [torch.rand(2, 3, length).softmax(-1).requires_grad_() for length in (21, 17)]
        masks = [torch.rand(2, length) < 0.8 for length in (21, 17)]
        temperatures = torch.tensor([0.3, 1.0, 2.0], requires_grad=True)
    rest = (temperatures, *masses, *masks, 0.7, solver, 3, 1e-5, balance)
    torch.library.opcheck(torch.ops.lotformer.cpu_forward.default, (*x.values(), *rest))
    if extras:
        scores = [torch.randn(2, length, 3, 11).transpose(1, 2).requires_grad_() for length in (21, 17)]
        tensors = (*scores, x["v"], None, x["log_masses"])
        torch.library.opcheck(torch.ops.lotformer.cpu_forward.default, (*tensors, *rest))


@needs_kernel
@pytest.mark.parametrize("form", ["sinkhorn", "newton, keys"])
def test_it_compiles_into_one_graph(form: str) -> None:
    x = inputs(query_masses=True)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rest: dict[str, Any] = {name: t for name, t in x.items() if name not in "qkv"}
        return lot_attention(q * 1.5, k, v, **rest, **FORMS[form], backend="cpu") * 2

    leaves = [x[name] for name in "qkv"]
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    results = []
    for function in (attend, compiled):
        out = function(*leaves)
        results.append((out, *torch.autograd.grad(out, leaves, torch.ones_like(out).cumsum(2))))
    for plain, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, plain)


@needs_kernel
def test_it_exports() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pivots = nn.Parameter(torch.randn(3, 5, 19))
            self.log_masses = nn.Parameter(torch.zeros(3, 5).log_softmax(-1))

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return lot_attention(q, k, v, self.pivots, self.log_masses, backend="cpu")

    x = {name: t.detach() for name, t in inputs().items()}
    layer, arguments = Layer(), tuple(x[name] for name in "qkv")
    program = torch.export.export(layer, arguments)
    assert "lotformer.cpu_forward" in str(program.graph)
    torch.testing.assert_close(program.module()(*arguments), layer(*arguments))


@needs_kernel
def test_torch_func_transforms_run_on_the_reference() -> None:
    x = {name: t.detach() for name, t in inputs().items()}

    def attend(q: Tensor) -> Tensor:
        return lot_attention(q[None], x["k"][:1], x["v"][:1], x["pivots"], x["log_masses"])[0]

    both = torch.func.vmap(attend)(x["q"])
    torch.testing.assert_close(both[1], attend(x["q"][1]), rtol=1e-4, atol=1e-6)


@needs_kernel
@pytest.mark.parametrize("isa", cpu.instruction_sets())
@pytest.mark.parametrize("form", FORMS)
def test_every_instruction_set_of_this_machine_agrees(isa: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOTFORMER_CPU_ISA", isa)
    for shape in ({"n": 50, "m": 77, "rank": 13, "dim": 21}, {"n": 33, "m": 16, "rank": 32, "dim": 64}):
        plain = problem(query_masses=True, key_masses=True, **shape)
        for x in (plain, scored(plain)):
            got = run(x, torch.float32, "cpu", eps=0.2, **FORMS[form])
            assert_agrees(got, run(x, torch.float64, "reference", eps=0.2, **FORMS[form]), 1e-5)


@needs_kernel
def test_an_unknown_instruction_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOTFORMER_CPU_ISA", "abacus")
    with pytest.raises(RuntimeError, match="abacus"):
        lot_attention(**inputs(), backend="cpu")


@needs_kernel
def test_the_kernel_never_reads_scratch_it_has_not_written() -> None:
    """With scratch full of NaN the results do not change by a bit."""
    code = """
        import sys, torch
        sys.path.insert(0, "tests")
        from support.cpu_kernel import FORMS, problem, run, scored
        torch.set_num_threads(1)
        for dtype in (torch.float32, torch.bfloat16):
            for eps in (1.0, 0.01):
                for form in FORMS.values():
                    x = problem(n=53, m=37, rank=7, dim=13, value_dim=9, query_masses=True)
                    mask = torch.arange(37).expand(2, 37) % 5 != 0
                    for given in (x, scored(x)):
                        for name, t in run(given, dtype, "cpu", eps=eps, **form, key_mask=mask).items():
                            print(name, t.double().sum().item(), t.double().abs().sum().item())
    """
    clean = in_new_process(code)
    assert "nan" not in clean
    assert in_new_process(code, LOTFORMER_CPU_POISON="1") == clean


def test_without_the_extension_the_reference_runs_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lotformer.ops.cpu.operators.load_error", "no such file")
    monkeypatch.setattr(backends, "_missed", set())
    x = inputs()
    with pytest.warns(UserWarning, match="not built .*no such file"):
        first = lot_attention(**x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = lot_attention(**x)
    assert torch.equal(first, second)
    assert torch.equal(first, lot_attention(**x, backend="reference"))
    with pytest.raises(ValueError, match="compiler"):
        lot_attention(**x, backend="cpu")


@needs_kernel
@pytest.mark.parametrize(
    ("change", "message"),
    [({"dtype": torch.float64}, "float32"), ({"rank": 257}, "256"), ({"dim": 300}, "256")],
    ids=["fp64", "rank", "head dimension"],
)
def test_what_it_cannot_run_is_explained_and_goes_to_the_reference(change: dict, message: str) -> None:
    dtype = change.pop("dtype", torch.float32)
    x = {name: t.to(dtype) for name, t in problem(n=5, m=5, **change).items()}
    assert lot_attention(**x).dtype == dtype
    with pytest.raises(ValueError, match=message):
        lot_attention(**x, backend="cpu")


@needs_kernel
def test_an_output_whose_gradient_is_not_asked_for_costs_nothing() -> None:
    class Ignored(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> None:
            return None

    x = inputs()
    (Ignored.apply(lot_attention(**x, backend="cpu")).sum() + x["q"].sum()).backward()
    assert torch.equal(x["q"].grad, torch.ones_like(x["q"]))
    assert x["k"].grad is None


@needs_kernel
def test_a_batch_of_zero_gives_parameters_a_gradient_of_zero() -> None:
    x = inputs(batch=0)
    lot_attention(**x, backend="cpu").sum().backward()
    assert not x["pivots"].grad.any()
    assert not x["log_masses"].grad.any()


@needs_kernel
def test_forward_mode_is_left_to_the_reference() -> None:
    x = {name: t.detach() for name, t in inputs().items()}
    with torch.autograd.forward_ad.dual_level():
        dual = {**x, "q": torch.autograd.forward_ad.make_dual(x["q"], torch.ones_like(x["q"]))}
        assert torch.autograd.forward_ad.unpack_dual(lot_attention(**dual)).tangent is not None
        with pytest.raises(ValueError, match="no forward-mode derivative"):
            lot_attention(**dual, backend="cpu")


@needs_kernel
def test_masses_of_pivots_are_judged_as_the_kernel_sees_them() -> None:
    x = {name: t.detach() for name, t in inputs(rank=2).items()}
    x["log_masses"] = torch.tensor([0.51, 0.49]).log().bfloat16().expand(3, 2)
    assert lot_attention(**x, backend="cpu").isfinite().all()  # rounded, but masses
    x["log_masses"] = torch.tensor([0.6, 0.45]).log().expand(3, 2)
    with pytest.raises(ValueError, match=r"`log_masses`.*log_softmax"):
        lot_attention(**x, backend="cpu")


def run_out_of_memory(solver: str) -> None:
    tokens, rank = 50_000, 250  # 48 MiB of scores
    q, k, v = torch.randn(3, 1, 1, tokens, 8)
    pivots, log_masses = torch.randn(1, rank, 8), torch.full((1, rank), 1 / rank).log()
    some = [x[:, :, :9] for x in (q, k, v)]  # a large call would leave its memory to the next one
    few = lot_attention(*some, pivots, log_masses, solver="sinkhorn", backend="cpu")
    limit, used = resource.getrlimit(resource.RLIMIT_AS), []
    resource.setrlimit(resource.RLIMIT_AS, (_virtual_memory() + (30 << 20), limit[1]))
    try:
        for _ in range(20):
            with pytest.raises(RuntimeError, match="lotformer: out of memory"):
                lot_attention(q, k, v, pivots, log_masses, solver=solver, backend="cpu")
            used.append(_virtual_memory())
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    assert used[-1] - used[9] < 2 << 20  # the allocator takes a few calls to settle; a leak goes on
    again = lot_attention(*some, pivots, log_masses, solver="sinkhorn", backend="cpu")
    assert torch.equal(again, few)


@needs_kernel
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits memory as Linux does")
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_call_that_finds_no_memory_says_so_and_keeps_none(solver: str) -> None:
    assert forked.run(run_out_of_memory, solver) == 0  # this process may keep memory of earlier tests to give away


def _virtual_memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
