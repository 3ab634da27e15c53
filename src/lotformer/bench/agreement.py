"""A kernel that disagrees with the definition is not timed."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import backends
from ..ops.problem import Solve, Transport

TOLERANCE = 1e-5  # relative, fp32 at ε >= 0.05: values and gradients


class KernelDisagrees(RuntimeError):
    """A backend's result is not that of the fp64 reference."""


def check_backend(
    backend: str | None, *, rank: int, head_dim: int, heads: int, n: int, eps: float, iters: int, backward: bool
) -> str:
    """Compare the backend that a timing would use with the fp64 reference, and return its name.

    Values always, gradients of q, k, v, pivots and masses with `backward`; the error of a tensor is its largest
    deviation over the largest entry of the reference.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v = (draw(2, heads, n, head_dim) for _ in range(3))
    pivots, log_masses = draw(heads, rank, head_dim), draw(heads, rank).log_softmax(-1)
    transport, solve = Transport(q, k, v, pivots, log_masses), Solve(eps, "sinkhorn", iters)
    chosen = backends.choose(transport, solve, backend)
    upstream = draw(2, heads, n, head_dim)
    expected = _evaluate(backends.REFERENCE, transport, solve, torch.float64, upstream, backward)
    got = _evaluate(chosen, transport, solve, torch.float32, upstream, backward)
    for name, reference in expected.items():
        error = ((got[name].double() - reference).abs().amax() / reference.abs().amax()).item()
        if not error <= TOLERANCE:
            raise KernelDisagrees(
                f"backend {chosen.name!r} disagrees with the fp64 reference: relative error {error:.1e} of {name} "
                f"at n={n}, rank={rank}, eps={eps} (allowed: {TOLERANCE:.0e}). It is not timed."
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
    names = ("q", "k", "v", "pivots", "log_masses")
    inputs = {name: getattr(transport, name).to(dtype).requires_grad_(backward) for name in names}
    out = backend.run(transport._replace(**inputs), solve).out
    found = {"the output": out.detach()}
    if backward:
        gradients = torch.autograd.grad(out, list(inputs.values()), upstream.to(dtype))
        found |= {f"the gradient of {name}": g for name, g in zip(names, gradients, strict=True)}
    return found
