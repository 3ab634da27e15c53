"""Attention through pivots that are found in the sample: softmax for what is near, groups of keys for the rest."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import backends, plain
from .beside import _is_recorded
from .plain.found import Found, Grouping
from .plain.window import Reach
from .precision import no_autocast


def found_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grouping: Grouping,
    reach: Reach | None = None,
    *,
    gain: Tensor | None = None,
    shift: Tensor | None = None,
    offset: Tensor | None = None,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    groups: Tensor | None = None,
    backend: str | None = None,
) -> Found:
    """Softmax in which most keys count as the centre of a group of keys: linear in N and M, with nothing to learn.

    The keys of every sample and head are put into groups, as the queries see them (`plain.groups`). With centres c_t,
    the mean of the keys of group t, and X_i the keys that query i reads exactly,

        out_i ∝ Σ_{j∈X_i} exp(q_i·k_j / √D) v_j + Σ_{j∉X_i} exp(q_i·z_t(j) / √D + b) v_j,    z_t = γ c_t + w

    X_i holds the special tokens, the window around i and the first keys of the groups that weigh most for i. The rest
    is a coupling of rank R: its query plan is softmax against the groups, its key plan sends each key to its group, and
    the marginal of the keys is exact. Errors are of second order in the radius of a group; where each key is a group of
    its own, or every key is in X_i, this is softmax.

    Gradients are those of the algorithm with the groups held fixed: through centres, values and corrections.

    Args:
        q: queries `(B, H, N, D)`. k: keys `(B, H, P + M, D)`. v: values `(B, H, P + M, Dv)`; special tokens in front.
        reach: of the window, which takes as many queries as keys after the special tokens: query i sits at key i.
        gain, shift, offset: γ `(H,)`, w `(H, D)` and b `(H,)`; 1, 0 and 0 by default.
        query_mask, key_mask: boolean `(B, N)`, `(B, P + M)`, True = a real token. Padding has no mass.
        groups: of the keys after the special tokens `(B, H, M)`, R for padding, if they are known already.

    Returns:
        What is read, in the dtype of `q`; which part of each row was exact; and the groups. Padded queries, and those
        without keys, read zeros. A sample does not depend on its batch.
    """
    _check(q, k, v, grouping, reach, query_mask, key_mask, groups)
    problem = (q, k, v, gain, shift, offset, query_mask, key_mask, reach, grouping, groups)
    empty = not q.shape[2] or not k.shape[2]
    run = plain.read_groups if empty or _is_recorded() else backends.FOUND.choose(backend, *problem).run
    with no_autocast(q.device.type):
        return run(*problem)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grouping: Grouping,
    reach: Reach | None,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    groups: Tensor | None,
) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"`{name}`: expected shape (B, H, tokens, width), got {tuple(x.shape)}.")
    batch, heads, n, dim = q.shape
    if k.shape[:2] != (batch, heads) or k.shape[3] != dim:
        raise ValueError(f"`k`: expected ({batch}, {heads}, M, {dim}) to match q, got {tuple(k.shape)}.")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"`v`: expected {tuple(k.shape[:3])} and a width, to match k, got {tuple(v.shape)}.")
    m = k.shape[2]
    for name, least in (("rank", 1), ("steps", 1), ("prefix", 0), ("heaviest", 0), ("most", 0)):
        _expect_count(name, getattr(grouping, name), least)
    if grouping.prefix > m:
        raise ValueError(f"`prefix`: expected at most the number of keys, {m}, got {grouping.prefix}.")
    body = m - grouping.prefix
    if reach is not None and (n != body or (reach.grid is not None and reach.grid[0] * reach.grid[1] != n)):
        raise ValueError(
            f"`reach`: a window takes a query for each of the {body} keys after the prefix, got {n} queries and the "
            f"grid {reach.grid}. Without a window (`reach=None`) queries may be others than keys."
        )
    for name, mask, length in (("query_mask", query_mask, n), ("key_mask", key_mask, m)):
        if mask is not None and (mask.shape != (batch, length) or mask.dtype.is_floating_point):
            raise ValueError(f"`{name}`: expected booleans ({batch}, {length}), got {mask.dtype} {tuple(mask.shape)}.")
    if groups is not None and (groups.shape != (batch, heads, body) or groups.dtype.is_floating_point):
        raise ValueError(f"`groups`: expected integers ({batch}, {heads}, {body}), got {tuple(groups.shape)}.")


def _expect_count(name: str, x: Any, least: int) -> None:
    if not isinstance(x, int) or x < least:
        raise ValueError(f"`{name}`: expected an integer of at least {least}, got {x!r}.")
