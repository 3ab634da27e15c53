"""Triton kernels are trusted on a device after they have agreed with the reference there, and not before.

As in `test_triton_kernel`, the interpreter must be chosen before triton is imported: without it, this file runs itself
in a child process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton", reason="triton has no build for this platform")

if os.environ.get("TRITON_INTERPRET") != "1":

    @pytest.mark.long
    def test_kernels_are_checked_under_the_interpreter() -> None:
        child = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", __file__],
            env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
        )
        assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-1000:]

else:
    import triton
    import triton.language as tl  # noqa: F401  the interpreter looks for it

    from lotformer import lot_attention
    from lotformer.ops.triton import algebra, fused, selfcheck

    right_sweep, right_reverse, right_inverse = fused.sweep, fused.reverse_sweep, algebra.apply_inverse

    @triton.jit
    def wrong_sweep(s, log_a, log_m, g, column_ok):
        return 0.5 * right_sweep(s, log_a, log_m, g, column_ok)

    @triton.jit
    def wrong_reverse(s, log_a, log_m, g, g_next, gradient):
        x, y, z = right_reverse(s, log_a, log_m, g, g_next, gradient)
        return x, y, 0.5 * z

    @triton.jit
    def wrong_inverse(matrix, weight, side):
        return 0.7 * right_inverse(matrix, weight, side)

    @triton.jit
    def raising(matrix, weight, side):
        return no_such_name(matrix)  # noqa: F821

    BROKEN = {
        "values": ("sinkhorn", fused, "sweep", wrong_sweep, "the output deviates"),
        "gradients": ("sinkhorn", fused, "reverse_sweep", wrong_reverse, "the gradient of . deviates"),
        "algebra": ("newton", algebra, "apply_inverse", wrong_inverse, "deviates"),
        "does not compile": ("newton", algebra, "apply_inverse", raising, "it raised .*no_such_name"),
    }

    @pytest.fixture(autouse=True)
    def nothing_checked(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(selfcheck, "_agreed", set())
        monkeypatch.setattr(selfcheck, "_refused", {})

    def problem() -> dict[str, Tensor]:
        """In fp16, which the CPU kernel does not take: the interpreted one is the first that does."""
        generator = torch.Generator().manual_seed(0)
        q, k, v = torch.randn(3, 1, 1, 6, 4, generator=generator).half()
        pivots, masses = torch.randn(1, 3, 4, generator=generator), torch.full((1, 3), 1 / 3)
        return {"q": q, "k": k, "v": v, "pivots": pivots, "log_masses": masses.log()}

    def test_kernels_that_agree_are_picked_and_checked_once(monkeypatch) -> None:
        x, calls = problem(), []
        deviation = selfcheck.deviation
        monkeypatch.setattr(selfcheck, "deviation", lambda *given: calls.append(given) or deviation(*given))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = [lot_attention(**x, iters=2) for _ in range(2)]
        assert torch.equal(found[0], lot_attention(**x, iters=2, backend="triton"))
        assert torch.equal(*found)
        assert len(calls) == 1
        lot_attention(**{name: t.bfloat16() if t.dtype == torch.half else t for name, t in x.items()})
        assert len(calls) == 1  # the CPU kernel takes it

    @pytest.mark.parametrize(("solver", "module", "name", "wrong", "said"), BROKEN.values(), ids=BROKEN)
    def test_a_broken_kernel_is_replaced_by_plain_pytorch_with_one_warning(
        solver, module, name, wrong, said, monkeypatch
    ) -> None:
        monkeypatch.setattr(module, name, wrong)
        x = problem()
        expected = lot_attention(**x, solver=solver, backend="reference")
        with pytest.warns(UserWarning, match=f"plain PyTorch on cpu for torch.float16.*{said}") as told:
            found = lot_attention(**x, solver=solver)
        assert len(told) == 1
        assert torch.equal(found, expected)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(lot_attention(**x, solver=solver), expected)
            lot_attention(**x, solver="newton" if solver == "sinkhorn" else "sinkhorn")  # refused with the device

    def test_a_name_forces_a_broken_kernel(monkeypatch) -> None:
        monkeypatch.setattr(fused, "sweep", wrong_sweep)
        x = problem()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            forced = lot_attention(**x, backend="triton")
        assert not torch.allclose(forced, lot_attention(**x, backend="reference"), atol=1e-2)

    def test_the_first_use_may_be_inside_a_checkpoint_under_autocast() -> None:
        x = problem()
        q = x.pop("q").requires_grad_()

        def attend(q: Tensor) -> Tensor:
            return lot_attention(q, **x, iters=2)

        with torch.autocast("cpu"), torch.random.fork_rng():
            before = torch.get_rng_state()
            checkpoint(attend, q, use_reentrant=False).sum().backward()
            assert torch.equal(torch.get_rng_state(), before)
        assert len(selfcheck._agreed) == 1
        expected = torch.autograd.grad(lot_attention(q, **x, iters=2, backend="triton").sum(), q)[0]
        assert torch.equal(q.grad, expected)

    @pytest.mark.parametrize("broken", [False, True], ids=["right", "broken"])
    def test_the_first_use_may_be_compiled_into_one_graph(broken, monkeypatch) -> None:
        torch.compiler.reset()
        if broken:
            monkeypatch.setattr(fused, "sweep", wrong_sweep)
        x, chosen = problem(), "reference" if broken else "triton"

        def attend(q: Tensor) -> Tensor:
            return lot_attention(**{**x, "q": q}, iters=2)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = torch.compile(attend, fullgraph=True, backend="aot_eager")(x["q"])
        assert (len(selfcheck._agreed), len(selfcheck._refused)) == (not broken, broken)
        torch.testing.assert_close(found, lot_attention(**x, iters=2, backend=chosen))

    def test_what_computes_nothing_needs_no_check() -> None:
        mode = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            x = {name: mode.from_tensor(t) for name, t in problem().items()}
            lot_attention(**x, iters=2)
        assert not selfcheck._agreed
