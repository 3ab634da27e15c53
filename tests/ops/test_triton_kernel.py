"""The Triton kernels agree with the fp64 reference, in values and in every gradient.

On a GPU if there is one, else under Triton's interpreter. The interpreter must be chosen before triton is imported, and
other tests may have imported it. So without a GPU this file runs itself in two child processes: without
TRITON_INTERPRET it holds one test for each, with it their tests.
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
STRATEGIES = ("fused", "passes")

pytest.importorskip("triton", reason="triton has no build for this platform")

DEVICE = "cpu" if INTERPRETED else "cuda"

if not INTERPRETED and not torch.cuda.is_available():

    @pytest.mark.long
    @pytest.mark.parametrize("tests", ["passes", "not passes"])
    def test_kernels_pass_under_the_interpreter(tests: str) -> None:
        child = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", __file__, "-k", tests],
            env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
        )
        assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-1000:]

else:
    from lotformer import coupling, lot_attention, lot_attention_from_scores
    from lotformer.ops import reference
    from lotformer.ops.problem import BALANCES, Solve, Transport
    from lotformer.ops.triton import op
    from support.problems import solve

    if INTERPRETED:
        from triton.runtime import interpreter

        # The interpreter adapts triton.language to itself before every call of a function, which takes as long as the
        # call. Once for each module is enough.
        _adapted: set[int] = set()

        def _call(self, *arguments, **named):
            if id(self.fn.__globals__) not in _adapted:
                interpreter._patch_lang(self.fn)
                _adapted.add(id(self.fn.__globals__))
            return self.rewrite()(*arguments, **named)

        interpreter.InterpretedFunction.__call__ = _call

    def _problem(
        *, b=1, h=2, n=20, m=17, r=5, d=12, dv=20, eps=1.0, solver="sinkhorn", iters=3, tol=1e-6, size=1.0, seed=0,
        balance="both", masses=False, masks=False, empty=False, scores=False, pivots_of_samples=False,
    ) -> tuple[dict[str, Tensor], dict[str, object]]:  # fmt: skip
        """Differentiable tensors in fp64, and everything else. If `scores`, q and k are scores: there are no pivots."""
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        if scores:
            d = r
        tensors = {
            "q": size * randn(b, h, n, d), "k": size * randn(b, h, m, d), "v": randn(b, h, m, dv),
            "pivots": randn(b, h, r, d) if pivots_of_samples else randn(h, r, d),
            "log_masses": randn(h, r).log_softmax(-1), "eps": eps * torch.linspace(1, 1.3, h, dtype=torch.float64),
        }  # fmt: skip
        if scores:
            del tensors["pivots"]
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
        rest = {"solver": solver, "iters": iters, "tol": tol, "balance": balance}
        return tensors, {**rest, "query_mask": query_mask, "key_mask": key_mask}

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
        named = {"pivots": None, **leaves, **rest}
        what, how = ({x: named[x] for x in kind._fields if x in named} for kind in (Transport, Solve))
        out = run(Transport(**what), Solve(**how)).out
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        (out * weights.to(out)).sum().backward()
        grads = {x: torch.zeros_like(y) if y.grad is None else y.grad for x, y in leaves.items()}
        return {x: y.detach().cpu() for x, y in {"out": out, **grads}.items()}

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
            size = value.norm()
            if name == "eps":  # it sums terms of both signs over everything: judged by the size of the terms
                scaled = ("pivots",) if "pivots" in tensors else ("q", "k")
                size = sum(expected[x].norm() * tensors[x].norm() for x in scaled)
            error, unavoidable = ((x[name].double() - value).norm() / size.clamp_min(1e-12) for x in (got, rounded))
            # where terms cancel (large ε, ill-conditioned solves) the reference in fp32 misses the tolerance too
            assert error < max(tolerance, 2 * unavoidable), f"{name}: {error:.1e}, reference {unavoidable:.1e}"

    SINKHORN = {
        "self-attention": {"n": 33, "m": 33},
        "cross-attention": {"n": 19, "m": 70, "dv": 33, "h": 1},
        "one-sweep": {"iters": 1, "h": 1},
        "one-token-one-pivot": {"n": 1, "m": 1, "r": 1, "d": 1, "dv": 1},
        "several-chunks": {"n": 150, "m": 131, "h": 1},
        "rank-above-tokens": {"n": 7, "m": 9, "r": 21},
        "wide-sums-over-pivots": {"n": 20, "m": 24, "r": 100, "h": 1, "iters": 2},
        "masses": {"n": 37, "m": 40, "masses": True, "h": 1},
        "masses-and-masks": {"b": 2, "masks": True, "masses": True},
        "empty-samples": {"b": 3, "h": 1, "masks": True, "empty": True},
        "pivots-of-samples": {"b": 2, "n": 9, "m": 17, "pivots_of_samples": True},
        "scores": {"n": 150, "m": 11, "r": 9, "h": 1, "scores": True},
        "eps-0.05": {"eps": 0.05, "iters": 5, "h": 1},
        "eps-100": {"eps": 100.0, "h": 1},
        "keys": {"balance": "keys", "n": 19, "m": 33},
        "keys-one-sweep-several-chunks": {"balance": "keys", "n": 150, "m": 131, "h": 1, "iters": 1},
        "keys-masses-and-masks-pivots-of-samples": {
            "balance": "keys", "b": 3, "h": 1, "masks": True, "masses": True, "empty": True, "pivots_of_samples": True
        },
        "keys-scores-eps-0.05": {"balance": "keys", "n": 17, "m": 11, "eps": 0.05, "scores": True},
        "none": {"balance": "none", "n": 19, "m": 33},
        "none-masses-and-masks-scores": {
            "balance": "none", "b": 3, "h": 1, "masks": True, "masses": True, "empty": True, "scores": True
        },
        "none-several-chunks-pivots-of-samples": {
            "balance": "none", "b": 2, "n": 20, "m": 131, "h": 1, "pivots_of_samples": True
        },
    }  # fmt: skip

    @pytest.mark.parametrize("options", SINKHORN.values(), ids=SINKHORN)
    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_sinkhorn_agrees_with_the_reference(strategy, options):
        _assert_agrees(strategy, **options)

    @pytest.mark.parametrize("options", [{"dtype": torch.bfloat16}, {"dtype": torch.float16},
                                         {"dtype": torch.bfloat16, "balance": "keys", "scores": True}],
                             ids=["bf16", "fp16", "bf16-scores"])  # fmt: skip
    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_half_precision_inputs_agree_with_the_reference(strategy, options):
        _assert_agrees(strategy, h=1, tolerance=4 * torch.finfo(options["dtype"]).eps, **options)

    NEWTON = {
        "cross-attention": {"n": 19, "m": 33, "h": 1, "r": 3},
        "masses-and-masks-pivots-of-samples": {
            "b": 3, "h": 1, "n": 12, "m": 9, "r": 3, "masks": True, "masses": True, "empty": True,
            "pivots_of_samples": True,
        },
        "eps-0.1": {"eps": 0.1, "h": 1, "r": 4},
        "keys": {"balance": "keys", "n": 19, "m": 20, "r": 3},
        "keys-masses-and-masks-scores": {
            "balance": "keys", "b": 2, "h": 1, "r": 3, "masks": True, "masses": True, "scores": True
        },
        "keys-eps-0.1-pivots-of-samples": {
            "balance": "keys", "b": 2, "h": 1, "r": 4, "eps": 0.1, "pivots_of_samples": True
        },
        "none": {"balance": "none", "n": 9, "m": 7, "r": 3, "h": 1},
    }  # fmt: skip

    @pytest.mark.parametrize("options", NEWTON.values(), ids=NEWTON)
    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_newton_agrees_with_the_reference(strategy, options):
        _assert_agrees(strategy, solver="newton", **options)

    def test_newton_in_passes_over_several_chunks_at_a_fixed_cost():
        _assert_agrees("passes", solver="newton", balance="keys", h=1, n=140, m=140, r=3, tol=None)

    @pytest.mark.parametrize("solver", ["sinkhorn", "newton"])
    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_a_pivot_that_no_query_wants_stays_finite(strategy, solver):
        tensors, rest = _problem(balance="keys", solver=solver, n=9, m=7, r=3, h=1, eps=0.1)
        tensors["pivots"][:, 0] = -1e3 * tensors["q"][0].mean(1)
        for name, value in _kernel(strategy, tensors, rest).items():
            assert value.isfinite().all(), name

    @pytest.mark.parametrize("strategy", STRATEGIES)
    @pytest.mark.parametrize("eps", [0.01, 100.0])
    def test_huge_scores_stay_finite_on_the_backend(strategy, eps):
        tensors, rest = _problem(eps=eps, size=1e4 * eps, h=1)
        for name, value in _kernel(strategy, tensors, rest).items():
            assert value.isfinite().all(), name

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_contents_of_padding_do_not_matter_to_the_backend(strategy):
        tensors, rest = _problem(b=2, h=1, masks=True, iters=2)
        clean = _kernel(strategy, tensors, rest)
        for name, mask in (("q", "query_mask"), ("k", "key_mask"), ("v", "key_mask")):
            tensors[name] = tensors[name].masked_fill(~rest[mask][:, None, :, None], torch.nan)
        poisoned = _kernel(strategy, tensors, rest)
        for name, value in clean.items():
            assert torch.equal(value, poisoned[name]), name

    @pytest.mark.parametrize("strategy", STRATEGIES)
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

    @pytest.mark.parametrize("balance", BALANCES)
    def test_plans_are_those_that_the_backend_applies(balance):
        tensors, _ = _problem(b=2, h=1, n=9, m=7, r=3, pivots_of_samples=True)
        q, k, v, pivots, log_masses = (
            tensors[x].to(DEVICE, torch.float32) for x in ("q", "k", "v", "pivots", "log_masses")
        )
        mask = torch.arange(7, device=DEVICE) < torch.tensor([[7], [4]], device=DEVICE)
        options = {"key_mask": mask, "iters": 2, "balance": balance, "backend": "triton"}
        plan = coupling(q, k, pivots, log_masses, **options)
        solution = solve(q, k, v, pivots, log_masses, **options)
        torch.testing.assert_close(plan.apply(v), solution.out, rtol=1e-4, atol=1e-5)
        assert (plan.residual() < 2 * solution.residual / (1 - solution.residual) + 1e-5).all()

    def test_the_backend_takes_scores():
        tensors, _ = _problem(h=1, n=9, m=7, scores=True)
        q, k, v, log_masses = (tensors[x].to(DEVICE, torch.float32) for x in ("q", "k", "v", "log_masses"))
        got, expected = (
            lot_attention_from_scores(q, k, v, log_masses, eps=0.5, iters=2, backend=name)
            for name in ("triton", "reference")
        )
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)

    def test_backend_ops_are_registered_correctly():
        tensors, _ = _problem(h=1, n=9, m=7, masses=True)
        given = {x: y.to(DEVICE, torch.float32).requires_grad_() for x, y in tensors.items()}
        z, log_m = given["pivots"], given["log_masses"]
        log_a = [given[x].detach().log().reshape(1, 1, -1).requires_grad_() for x in ("query_masses", "key_masses")]
        arguments = (given["q"], given["k"], given["v"], z, log_m, *log_a, None, None, False, 2, None, "keys", "fused")
        torch.library.opcheck(op.attention, arguments, test_utils=("test_schema", "test_faketensor"))

    def test_backend_explains_what_it_does_not_take():
        q = torch.randn(1, 1, 4, 8, dtype=torch.float64, device=DEVICE)
        log_masses = torch.full((1, 2), 0.5, device=DEVICE).log()
        with pytest.raises(ValueError, match="float64"):
            lot_attention(q, q, q, q[0, :, :2], log_masses, backend="triton")
