"""Found groups as pivots of LOT's own operator: where the marginals of the queries are imposed too."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .attention import couple, solve_attention
from .coupling import Coupling
from .padding import zero_padding
from .plain.found import Grouping
from .plain.groups import find_groups, one_hot
from .precision import no_autocast
from .problem import Solve, Transport

_APART = -1e4
"""The score of a key with a group that is not its own."""
_LIGHTEST = -60.0
"""The logarithm of the mass of a group without keys."""


def found_transport(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grouping: Grouping,
    solve: Solve,
    *,
    gain: Tensor | None = None,
    shift: Tensor | None = None,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    groups: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """`lot_attention` with the groups of `found_attention` for pivots, of masses p_t = n_t / M.

    Every key goes to its group, so that the key plan `W[j, t] = [t(j) = t] / n_t` needs no solve; with `balance="both"`
    the query plan sends each group its mass, and the matrix is doubly stochastic. With "none" it is `found_attention`
    without a window.

    Args:
        q: `(B, H, N, D)`. k, v: `(B, H, M, ·)`. grouping: its rank and steps; no key is read exactly. solve: its ε and
            scale are not used. gain: `(H,)`. shift: `(H, D)`. The others are those of `found_attention`.

    Returns:
        `(B, H, N, Dv)` in the dtype of `q`. Padded queries, and samples without keys, read zeros.
    """
    with no_autocast(q.device.type):
        transport = _transport(q, k, v, grouping, gain, shift, query_mask, key_mask, groups)
        out = solve_attention(transport, _of_scores(solve), backend).out.view(*q.shape[:3], -1)
        if key_mask is not None:
            out = out.masked_fill(~key_mask.any(-1)[:, None, None, None], 0.0)
        return zero_padding(out.to(q.dtype), query_mask)


def found_coupling(
    q: Tensor,
    k: Tensor,
    grouping: Grouping,
    solve: Solve,
    *,
    gain: Tensor | None = None,
    shift: Tensor | None = None,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    groups: Tensor | None = None,
    backend: str | None = None,
) -> Coupling:
    """The two plans behind `found_transport`."""
    with no_autocast(q.device.type):
        transport = _transport(q, k, k[..., :1], grouping, gain, shift, query_mask, key_mask, groups)
        plan = couple(transport, _of_scores(solve), backend)
        shape, tokens = q.shape[:2], (1, q.shape[0] * q.shape[1], -1)
        return replace(
            plan,
            query_plan=plan.query_plan.unflatten(1, shape)[0],
            key_plan=plan.key_plan.unflatten(1, shape)[0],
            masses=plan.masses.reshape(*shape, -1),
            query_masses=plan.query_masses.expand(tokens).unflatten(1, shape)[0],
            key_masses=plan.key_masses.expand(tokens).unflatten(1, shape)[0],
            key_mask=key_mask,
        )


def _of_scores(solve: Solve) -> Solve:
    return solve._replace(eps=1.0, scale=1.0)


def _transport(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grouping: Grouping,
    gain: Tensor | None,
    shift: Tensor | None,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    groups: Tensor | None,
) -> Transport:
    """The problem on scores. The operator's pivots have masses by head, so here every sample is a head of its own."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k = zero_padding(q, query_mask).to(dtype), zero_padding(k, key_mask).to(dtype)
    v = zero_padding(v, key_mask).to(dtype)
    if groups is None:
        groups = find_groups(q, k, query_mask, key_mask, grouping.rank, grouping.steps)
    member = one_hot(groups, grouping.rank, dtype)
    size = member.sum(2)
    centres = member.mT @ k / size.clamp_min(1)[..., None]
    if gain is not None:
        centres = centres * gain.to(dtype)[:, None, None]
    if shift is not None:
        centres = centres + shift.to(dtype)[:, None]
    log_masses = (size / size.sum(-1, keepdim=True).clamp_min(1)).log().clamp_min(_LIGHTEST).log_softmax(-1)
    return Transport(
        _heads(q @ centres.mT * q.shape[3] ** -0.5),
        _heads((1 - member) * _APART),
        _heads(v),
        None,
        log_masses.flatten(0, 1),
        query_masses=_masses(query_mask, q),
        key_masses=_masses(key_mask, k),
    )


def _heads(x: Tensor) -> Tensor:
    return x.flatten(0, 1)[None]


def _masses(mask: Tensor | None, tokens: Tensor) -> Tensor | None:
    """Of the tokens `(1, B · H, N)`: none for padding, but for a sample of nothing else, whose result is not used."""
    if mask is None:
        return None
    real = (mask | ~mask.any(-1, keepdim=True)).to(tokens.dtype)
    return _heads((real / real.sum(-1, keepdim=True))[:, None].expand(*tokens.shape[:3]))
