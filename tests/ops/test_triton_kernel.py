"""The Triton kernels agree with the fp64 reference, in values and in every gradient.

On a GPU if there is one, else under Triton's interpreter. The interpreter must be chosen before triton is imported, and
other tests may have imported it. So without a GPU this file runs itself in child processes: without TRITON_INTERPRET it
holds one test a group, with it the tests of the groups.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GROUPS = ("sinkhorn_in_one_program", "sinkhorn_in_passes", "newton_in_one_program", "newton_in_passes", "backend")

pytest.importorskip("triton", reason="triton has no build for this platform")

DEVICE = "cpu" if INTERPRETED else "cuda"

if not INTERPRETED and not torch.cuda.is_available():

    @pytest.mark.long
    @pytest.mark.parametrize("group", GROUPS)
    def test_kernels_pass_under_the_interpreter(group: str) -> None:
        child = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", __file__, "-k", group],
            env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
        )
        assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-1000:]

else:
    from lotformer import lot_attention
    from lotformer.ops import reference
    from lotformer.ops.problem import Solve, Transport
    from lotformer.ops.triton import op

    def _problem(
        *, b=1, h=2, n=37, m=29, r=5, d=12, dv=20, eps=1.0, solver="sinkhorn", iters=3, tol=1e-6, size=1.0, seed=0,
        masses=False, masks=False, empty=False,
    ) -> tuple[dict[str, Tensor], dict[str, object]]:  # fmt: skip
        """Differentiable tensors in fp64, and everything else."""
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        tensors = {
            "q": size * randn(b, h, n, d), "k": size * randn(b, h, m, d), "v": randn(b, h, m, dv),
            "pivots": randn(h, r, d), "log_masses": randn(h, r).log_softmax(-1),
            "eps": eps * torch.linspace(1, 1.3, h, dtype=torch.float64),
        }  # fmt: skip
        query_mask = key_mask = None
        if masks:
            query_mask = torch.rand(b, n, generator=generator) < 0.7
            key_mask = torch.rand(b, m, generator=generator) < 0.7
            query_mask[:, 0] = key_mask[:, -1] = True
            if empty:
                query_mask[-1] = False
                key_mask[0] = False
        if masses:
            for name, mask, shape in (("query_masses", query_mask, (b, n)), ("key_masses", key_mask, (b, h, m))):
                given = randn(*shape).exp()
                if mask is not None:
                    given = given * mask.reshape(b, *[1] * (len(shape) - 2), -1)
                tensors[name] = given / given.sum(-1, keepdim=True).clamp_min(1e-9)
        rest = {"solver": solver, "iters": iters, "tol": tol, "query_mask": query_mask, "key_mask": key_mask}
        return tensors, rest

    def _evaluate(
        run, tensors: dict[str, Tensor], rest: dict[str, object], dtype: torch.dtype, device: str = "cpu"
    ) -> dict[str, Tensor]:
        low = {"q", "k", "v"}
        wide = torch.float32 if dtype.itemsize < 4 else dtype
        leaves = {
            x: y.detach().to(device, dtype if x in low else wide, copy=True).requires_grad_()
            for x, y in tensors.items()
        }  # fmt: skip
        rest = {x: y.to(device) if isinstance(y, Tensor) else y for x, y in rest.items()}
        named = {**leaves, **rest}
        what, how = ({x: named[x] for x in kind._fields if x in named} for kind in (Transport, Solve))
        out = run(Transport(**what), Solve(**how)).out
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        (out * weights.to(out)).sum().backward()
        return {"out": out.detach().cpu(), **{x: y.grad.cpu() for x, y in leaves.items()}}

    def _kernel(strategy: str, tensors: dict[str, Tensor], rest: dict[str, object], dtype=torch.float32):
        return _evaluate(lambda *problem: op.run(*problem, strategy), tensors, rest, dtype, DEVICE)

    def _assert_agrees(strategy: str, *, tolerance: float = 1e-5, dtype=torch.float32, **options) -> None:
        tensors, rest = _problem(**options)
        if dtype != torch.float32:
            tensors |= {x: tensors[x].to(dtype).double() for x in ("q", "k", "v")}
        expected = _evaluate(reference.run, tensors, {**rest, "tol": 1e-12}, torch.float64)
        rounded = _evaluate(reference.run, tensors, rest, dtype)
        got = _kernel(strategy, tensors, rest, dtype)
        for name, value in expected.items():
            # ε sums terms of both signs over everything: its gradient is judged by the size of the terms
            size = value.norm() if name != "eps" else (expected["pivots"].norm() * tensors["pivots"].norm())
            error, unavoidable = ((x[name].double() - value).norm() / size.clamp_min(1e-12) for x in (got, rounded))
            # where terms cancel (large ε, ill-conditioned solves) the reference in fp32 misses the tolerance too
            assert error < max(tolerance, 2 * unavoidable), f"{name}: {error:.1e}, reference {unavoidable:.1e}"

    SINKHORN = {
        "self-attention": {"n": 33, "m": 33},
        "cross-attention": {"n": 19, "m": 70, "dv": 33},
        "one-sweep": {"iters": 1},
        "one-token-one-pivot": {"n": 1, "m": 1, "r": 1, "d": 1, "dv": 1},
        "several-chunks": {"n": 300, "m": 131, "h": 1},
        "rank-above-tokens": {"n": 7, "m": 9, "r": 21},
        "masses": {"masses": True, "h": 1},
        "masses-and-masks": {"b": 2, "masks": True, "masses": True},
        "empty-samples": {"b": 3, "h": 1, "masks": True, "empty": True},
        "eps-0.05": {"eps": 0.05, "iters": 5},
        "eps-100": {"eps": 100.0},
    }

    @pytest.mark.parametrize("options", SINKHORN.values(), ids=SINKHORN)
    def test_sinkhorn_in_one_program_agrees_with_the_reference(options):
        _assert_agrees("fused", **options)

    @pytest.mark.parametrize("options", SINKHORN.values(), ids=SINKHORN)
    def test_sinkhorn_in_passes_agrees_with_the_reference(options):
        _assert_agrees("passes", **options)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
    @pytest.mark.parametrize("strategy", ["fused", "passes"])
    def test_half_precision_inputs_of_sinkhorn_in_one_program_and_sinkhorn_in_passes(strategy, dtype):
        _assert_agrees(strategy, dtype=dtype, tolerance=4 * torch.finfo(dtype).eps)

    @pytest.mark.parametrize("strategy", ["fused", "passes"])
    def test_wide_sums_over_pivots_are_right_sinkhorn_in_passes(strategy):
        _assert_agrees(strategy, n=20, m=24, r=100, h=1, iters=2)

    NEWTON = {
        "cross-attention": {"n": 19, "m": 33, "h": 1, "r": 3},
        "masses-and-masks": {"b": 2, "h": 1, "n": 20, "m": 17, "r": 3, "masks": True, "masses": True, "empty": True},
        "eps-0.1": {"eps": 0.1, "h": 1, "n": 20, "m": 17, "r": 4},
    }

    @pytest.mark.parametrize("options", NEWTON.values(), ids=NEWTON)
    def test_newton_in_one_program_agrees_with_the_reference(options):
        _assert_agrees("fused", solver="newton", **options)

    @pytest.mark.parametrize("options", NEWTON.values(), ids=NEWTON)
    def test_newton_in_passes_agrees_with_the_reference(options):
        _assert_agrees("passes", solver="newton", **options)

    def test_newton_in_passes_over_several_chunks_at_a_fixed_cost():
        _assert_agrees("passes", solver="newton", h=1, n=140, m=9, r=3, tol=None)

    @pytest.mark.parametrize("strategy", ["fused", "passes"])
    @pytest.mark.parametrize("eps", [0.01, 100.0])
    def test_huge_scores_stay_finite_on_the_backend(strategy, eps):
        tensors, rest = _problem(eps=eps, size=1e4 * eps, h=1)
        for name, value in _kernel(strategy, tensors, rest).items():
            assert value.isfinite().all(), name

    @pytest.mark.parametrize("strategy", ["fused", "passes"])
    def test_contents_of_padding_do_not_matter_to_the_backend(strategy):
        tensors, rest = _problem(b=2, h=1, masks=True, iters=2)
        clean = _kernel(strategy, tensors, rest)
        for name, mask in (("q", "query_mask"), ("k", "key_mask"), ("v", "key_mask")):
            tensors[name] = tensors[name].masked_fill(~rest[mask][:, None, :, None], torch.nan)
        poisoned = _kernel(strategy, tensors, rest)
        for name, value in clean.items():
            assert torch.equal(value, poisoned[name]), name

    @pytest.mark.parametrize("strategy", ["fused", "passes"])
    def test_transposed_views_need_no_copy_on_the_backend(strategy):
        tensors, rest = _problem(iters=2)
        plain = _kernel(strategy, tensors, rest)
        for name in ("q", "k", "v"):
            tensors[name] = tensors[name].transpose(1, 2).contiguous().transpose(1, 2)
        viewed = _kernel(strategy, tensors, rest)
        for name, value in plain.items():
            assert torch.equal(value, viewed[name]), name

    def test_backend_is_chosen_by_name_and_traced_in_one_graph():
        tensors, _ = _problem(h=2)
        inputs = [
            tensors[x].to(DEVICE, torch.float32).requires_grad_() for x in ("q", "k", "v", "pivots", "log_masses")
        ]

        def attend(*given: Tensor) -> Tensor:
            return lot_attention(*given, iters=2, backend="triton")

        eager = attend(*inputs)
        expected = torch.autograd.grad(eager.sum(), inputs[:4])
        traced = torch.compile(attend, fullgraph=True, backend="aot_eager")(*inputs)
        assert torch.equal(traced, eager)
        for want, got in zip(expected, torch.autograd.grad(traced.sum(), inputs[:4]), strict=True):
            assert torch.allclose(want, got, rtol=1e-5, atol=1e-6)

    def test_backend_takes_pivots_of_samples():
        mask = torch.arange(11, device=DEVICE) < torch.tensor([[11], [4]], device=DEVICE)
        shapes = ((2, 2, 11, 8), (2, 2, 11, 8), (2, 2, 11, 8), (2, 2, 3, 8), (2, 3))
        inputs = [torch.randn(shape, device=DEVICE) for shape in shapes]
        inputs[4] = inputs[4].log_softmax(-1)
        got, expected = (
            lot_attention(*inputs, query_mask=mask, key_mask=mask, iters=2, backend=name)
            for name in ("triton", "reference")
        )
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)

    def test_backend_ops_are_registered_correctly():
        tensors, _ = _problem(h=1, n=9, m=7, masses=True)
        given = {x: y.to(DEVICE, torch.float32).requires_grad_() for x, y in tensors.items()}
        z, log_m = given["pivots"], given["log_masses"]
        log_a = [given[x].detach().log().reshape(1, 1, -1).requires_grad_() for x in ("query_masses", "key_masses")]
        arguments = (given["q"], given["k"], given["v"], z, log_m, *log_a, None, None, False, 2, None, "fused")
        torch.library.opcheck(op.attention, arguments, test_utils=("test_schema", "test_faketensor"))

    def test_backend_explains_what_it_does_not_take():
        q = torch.randn(1, 1, 4, 8, dtype=torch.float64, device=DEVICE)
        log_masses = torch.full((1, 2), 0.5, device=DEVICE).log()
        with pytest.raises(ValueError, match="float64"):
            lot_attention(q, q, q, q[0, :, :2], log_masses, backend="triton")
