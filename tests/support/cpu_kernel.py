"""What the tests of the CPU kernel share: random problems, and comparison with the reference in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lotformer.ops import cpu, lot_attention, lot_attention_from_scores

needs_kernel = pytest.mark.skipif(
    cpu.why_unavailable() is not None, reason="the extension is not built here, as on a machine without a compiler"
)

Inputs = dict[str, Tensor]

FORMS: dict[str, dict[str, Any]] = {
    "sinkhorn": {"solver": "sinkhorn"},
    "newton": {"solver": "newton"},
    "sinkhorn, keys": {"solver": "sinkhorn", "balance": "keys"},
    "newton, keys": {"solver": "newton", "balance": "keys"},
    "none": {"balance": "none"},
}
"""Options of everything the kernel can solve or leave."""


def exact(form: str) -> dict[str, Any]:
    """The same for a reference to compare with."""
    options = FORMS[form]
    return options | ({"tol": 1e-11} if options.get("solver") == "newton" else {})


def problem(
    batch: int = 2,
    heads: int = 3,
    n: int = 61,
    m: int = 61,
    rank: int = 11,
    dim: int = 19,
    value_dim: int | None = None,
    *,
    query_masses: bool = False,
    key_masses: bool = False,
    seed: int = 0,
) -> Inputs:
    """Tensors of one call in fp64, Gaussian, with uneven pivot masses and, if asked for, uneven token masses."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = {
        "q": normal(batch, heads, n, dim),
        "k": normal(batch, heads, m, dim),
        "v": normal(batch, heads, m, dim if value_dim is None else value_dim),
        "pivots": normal(heads, rank, dim),
        "log_masses": normal(heads, rank).log_softmax(-1),
    }
    if query_masses:
        x["query_masses"] = normal(batch, heads, n).softmax(-1)
    if key_masses:
        x["key_masses"] = normal(batch, m).softmax(-1)
    return {name: tensor.float().double() for name, tensor in x.items()}


def scored(x: Inputs) -> Inputs:
    """The same problem with scores in place of queries, keys and pivots, rounded to fp32."""
    rest = {name: tensor for name, tensor in x.items() if name != "pivots"}
    scores = {name: x[name] @ x["pivots"].mT / x[name].shape[-1] ** 0.5 for name in ("q", "k")}
    return rest | {name: tensor.float().double() for name, tensor in scores.items()}


def attend(x: Inputs, **options: Any) -> Tensor:
    """The operator on the inputs of a problem, `q` and `k` being scores if there are no pivots."""
    if "pivots" in x:
        return lot_attention(**x, **options)
    rest = {name: tensor for name, tensor in x.items() if name not in ("q", "k")}
    return lot_attention_from_scores(x["q"], x["k"], **rest, **options)


def run(x: Inputs, dtype: torch.dtype, backend: str, cotangent: Tensor | None = None, **options: Any) -> Inputs:
    """Output and gradients of every floating-point input, of `eps` too if it is a tensor; zero where it has no part."""
    narrow = {"q", "k", "v"}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = {name: t.to(dtype if name in narrow else wide).detach().clone() for name, t in x.items()}
    eps = options.pop("eps", 1.0)
    if isinstance(eps, Tensor):
        leaves["eps"] = eps.to(wide)
    for leaf in leaves.values():
        leaf.requires_grad_()
    out = attend({"eps": eps, **leaves}, backend=backend, **options)
    if cotangent is None:
        generator = torch.Generator().manual_seed(1)
        cotangent = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    cotangent = cotangent.to(dtype).to(out.dtype)
    grads = torch.autograd.grad(out, list(leaves.values()), cotangent, allow_unused=True, materialize_grads=True)
    return {"out": out.detach()} | {f"grad of {name}": g for name, g in zip(leaves, grads, strict=True)}


def assert_agrees(got: Inputs, expected: Inputs, tolerance: float, x: Inputs | None = None, floor: float = 0.0) -> None:
    """Every tensor within `tolerance` in relative norm.

    The gradient of ε is the inner product of the scores with their gradient, which may nearly cancel; its rounding
    is measured against the product of the norms. Where gradients may vanish (one pivot, one token), nothing is
    measured against less than `floor` times the gradient of the values.
    """
    least = floor * expected["grad of v"].norm() if floor else torch.tensor(0.0)
    for name, want in expected.items():
        have = got[name].double()
        assert have.isfinite().all(), f"{name} is not finite"
        size = want.norm()
        if name == "grad of eps":
            assert x is not None
            size = sum((x[t].norm() * expected[f"grad of {t}"].norm() for t in ("q", "k")), size)
        error = ((have - want).norm() / torch.maximum(size, least).clamp_min(1e-30)).item()
        assert error <= tolerance, f"{name}: relative error {error:.2e}, allowed {tolerance:.0e}"


def errors(got: Inputs, expected: Inputs) -> dict[str, float]:
    """Relative error of every tensor."""
    return {name: ((got[name] - want).norm() / want.norm()).item() for name, want in expected.items()}
