"""The operators beside the transport: what a mechanism does for its window, prefix, key masses and local mixing.

Each is defined in `plain` and runs on the best backend of its row in `backends`. `backend` forces one by name, or
raises; the name of a backend without the operator leaves the choice free.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import backends, plain
from .plain.window import Reach


def window(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    direction: Tensor,
    offset: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    reach: Reach,
    *,
    backend: str | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Softmax of each query over the prefix and its window of keys, and `σ(log-sum − q·direction − offset)`.

    Padding is never read; a query that is padding, or has no real key, reads zeros and has the share 0.

    Args:
        q: `(B, H, N, D)`. k, v: `(B, H, P + N, ·)`, the P keys of the prefix in front; without values nothing is read.
        direction: `(B, H, D)`. offset: `(B, H)`. query_mask: `(B, N)`. key_mask: `(B, P + N)`.
    """
    problem = (q, k, v, direction, offset, query_mask, key_mask, reach)
    run = plain.read_window if _is_recorded() else backends.WINDOW.choose(backend, *problem).run
    return run(*problem)


def pool(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    beta: float,
    powers: tuple[float, float],
    *,
    backend: str | None = None,
) -> Tensor:
    """Rows `(B, H, P, Dv)` for queries `(B, H, P, D)`: `softmax_j` of

        (β (q⁺·k_j⁺ + q⁻·k_j⁻))^p_s + (β (q⁺·k_j⁻ + q⁻·k_j⁺))^p_o,     x⁺ = relu(x), x⁻ = relu(−x)

    Padded keys and values may hold anything, queries may not.
    """
    problem = (q, k, v, key_mask, beta, powers)
    plainly = not k.shape[2] or _is_recorded()
    return (plain.pool if plainly else backends.POOLING.choose(backend, *problem).run)(*problem)


def key_masses(
    q: Tensor | None,
    k: Tensor,
    direction: Tensor,
    query_weight: Tensor | None,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    *,
    backend: str | None = None,
) -> Tensor:
    """`p_j ∝ exp(k_j·(w + α q̄ / √D)) (B, H, M)`, sum 1 over real keys, q̄ the mean of the real queries.

    Args:
        direction: `w (H, D)`. query_weight: `α (H,)`; without it there need not be queries.
    """
    problem = (q, k, direction, query_weight, query_mask, key_mask)
    # compilers fuse the few operators of the definition with what is around them
    plainly = torch.compiler.is_compiling() or not k.shape[2] or _is_recorded()
    return (plain.key_masses if plainly else backends.MASSES.choose(backend, *problem).run)(*problem)


def join(
    coupled: Tensor | None,
    prefix: Tensor | None,
    values: Tensor,
    filters: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    grid: tuple[int, int],
    convolution: Callable[[Tensor], Tensor] | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """`[prefix | coupled + convolution of the values after the prefix]`, `(B, H, N, D)`.

    Args:
        coupled: `(B, H, N - P, D)`; zeros if missing. prefix: `(B, H, P, D)`; none if missing.
        filters: `(H·D or D, 1, K)` along the sequence or `(…, 1, K, K)` on the grid, K odd.
        query_mask, key_mask: boolean `(B, N)`. Padded values count as zero, whatever they hold; padded rows of the
            prefix are zero, and what is coupled to padding stays as it is.
        convolution: called with images `(·, channels, …)` in place of a convolution with the filters, whatever the
            backend: a module that somebody looks at or has replaced.
    """
    problem = (coupled, prefix, values, filters, query_mask, key_mask, grid, convolution)
    special = 0 if prefix is None else prefix.shape[2]
    plainly = convolution is not None or values.shape[2] == special or _is_recorded()
    return (plain.join if plainly else backends.JOINING.choose(backend, *problem).run)(*problem)


def _is_recorded() -> bool:
    """True if operators are being recorded: by a tracer, whose programs run where our kernels are not, or by a
    dispatch mode, which should see the operators it knows (a counter of products, for one)."""
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting()
    return torch._C._is_tracing() or torch._C._len_torch_dispatch_stack() > 0
