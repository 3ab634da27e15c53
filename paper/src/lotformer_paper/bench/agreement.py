"""A kernel that disagrees with the definition is not timed."""

from __future__ import annotations

import torch
from torch import Tensor

from lotformer.ops import backends
from lotformer.ops.problem import Balance, Solve, Solver, Transport

TOLERANCE: dict[Solver, float] = {"sinkhorn": 1e-5, "newton": 1e-4}
"""Relative, fp32 at ε >= 0.05: values and gradients. An exact solve stops at a tolerance of its own."""


class KernelDisagrees(RuntimeError):
    """A backend's result is not that of the fp64 reference."""


def check_backend(
    backend: str | None,
    *,
    rank: int,
    head_dim: int,
    heads: int,
    n: int,
    eps: float,
    iters: int,
    backward: bool,
    solver: Solver = "sinkhorn",
    balance: Balance = "both",
    scores: bool = False,
) -> str:
    """Compare the backend that a timing would use with the fp64 reference, and return its name.

    Values always, gradients of q, k, v, pivots and masses with `backward`; the error of a tensor is its largest
    deviation over the largest entry of the reference. With `scores`, q and k are the scores of tokens.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v = (draw(2, heads, n, head_dim) for _ in range(3))
    pivots, log_masses = draw(heads, rank, head_dim), draw(heads, rank).log_softmax(-1)
    upstream = draw(2, heads, n, head_dim)
    transport, solve = Transport(q, k, v, pivots, log_masses), Solve(eps, solver, iters, 1e-6, balance=balance)
    if scores:
        q, k = (x @ pivots.mT * head_dim**-0.5 for x in (q, k))
        transport, solve = Transport(q, k, v, None, log_masses), solve._replace(scale=1.0)
    chosen = backends.TRANSPORT.choose(backend, transport, solve)
    expected = _evaluate(backends.TRANSPORT.reference, transport, solve, torch.float64, upstream, backward)
    got = _evaluate(chosen, transport, solve, torch.float32, upstream, backward)
    for name, reference in expected.items():
        error = ((got[name].double() - reference).abs().amax() / reference.abs().amax()).item()
        if not error <= TOLERANCE[solver]:
            form = "" if (solver, balance, scores) == ("sinkhorn", "both", False) else (
                f", {solver}, balance {balance}{', scores given' * scores}"
            )  # fmt: skip
            raise KernelDisagrees(
                f"backend {chosen.name!r} disagrees with the fp64 reference: relative error {error:.1e} of {name} "
                f"at n={n}, rank={rank}, eps={eps}{form} (allowed: {TOLERANCE[solver]:.0e}). It is not timed."
            )
    return chosen.name


def _evaluate(
    backend: backends.Backend,
    transport: Transport,
    solve: Solve,
    dtype: torch.dtype,
    upstream: Tensor,
    backward: bool,
) -> dict[str, Tensor]:
    names = [name for name in ("q", "k", "v", "pivots", "log_masses") if getattr(transport, name) is not None]
    inputs = {name: getattr(transport, name).to(dtype).requires_grad_(backward) for name in names}
    out = backend.run(transport._replace(**inputs), solve).out
    found = {"the output": out.detach()}
    if backward:
        gradients = torch.autograd.grad(out, list(inputs.values()), upstream.to(dtype))
        found |= {f"the gradient of {name}": g for name, g in zip(names, gradients, strict=True)}
    return found
