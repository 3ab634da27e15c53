"""Found groups as pivots of the operator: doubly stochastic, and without balance the same as read directly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lotformer.ops import Grouping, Solve, cpu, found_attention, found_transport
from support.found import Built, Problem, build

BACKENDS = ["reference"] + ([] if cpu.why_unavailable() else ["cpu"])
both = pytest.mark.parametrize("backend", BACKENDS)
several = st.builds(
    Problem,
    rank=st.integers(1, 40),
    prefix=st.just(0),
    grid=st.tuples(st.just(1), st.integers(2, 60)),
    window=st.none(),
    more_keys=st.sampled_from([0, 13]),
    dim=st.integers(1, 20),
    masked=st.booleans(),
    corrected=st.booleans(),
    seed=st.integers(0, 99),
)


def transport(b: Built, backend: str, v: Tensor | None = None, groups: Tensor | None = None, **options: Any) -> Tensor:
    dtype = torch.float32 if backend == "cpu" else torch.float64
    x = {name: t.to(dtype) for name, t in b.x.items() if name != "offset"}
    tokens = [x.pop(name) for name in ("q", "k", "v")]
    tokens[2] = tokens[2] if v is None else v.to(dtype)
    solve = Solve(**{"solver": "newton", **options})
    return found_transport(*tokens, Grouping(b.problem.rank), solve, **x, **b.masks, groups=groups, backend=backend)


@both
@given(several)
def test_the_matrix_is_doubly_stochastic(backend: str, p: Problem) -> None:
    b = build(p)
    keys = b.x["k"].shape[2]
    matrix = transport(b, backend, torch.eye(keys).expand(2, 2, -1, -1))
    queries = b.masks.get("query_mask", torch.ones(2, p.length, dtype=torch.bool))
    real = b.masks.get("key_mask", torch.ones(2, keys, dtype=torch.bool))
    some = queries.any(-1) & real.any(-1)
    rows = (queries & some[:, None]).to(matrix.dtype)[:, None].expand(-1, 2, -1)
    each = (queries.sum(-1) / real.sum(-1).clamp_min(1) * some)[:, None]
    columns = (real * each).to(matrix.dtype)[:, None].expand(-1, 2, -1)
    torch.testing.assert_close(matrix.sum(-1), rows, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(matrix.sum(-2), columns, rtol=1e-4, atol=1e-4)


@both
@given(several)
def test_without_balance_it_is_what_is_read_through_the_groups(backend: str, p: Problem) -> None:
    b = build(p)
    b.x.pop("offset", None)
    x = {name: t for name, t in b.x.items() if name not in ("q", "k", "v")}
    found = found_attention(b.x["q"], b.x["k"], b.x["v"], Grouping(p.rank), **x, **b.masks, backend="reference")
    out = transport(b, backend, balance="none", groups=found.groups)
    torch.testing.assert_close(out.double(), found.out, rtol=1e-4, atol=1e-5)


def test_gradients_with_the_groups_held_fixed_are_exact() -> None:
    b = build(Problem(rank=3, prefix=0, grid=(1, 7), window=None, dim=3, value_dim=2, masked=True))
    groups = found_attention(b.x["q"], b.x["k"], b.x["v"], Grouping(3), **b.masks).groups

    def run(q: Tensor, k: Tensor, v: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        solve = Solve(solver="newton", tol=1e-11)
        options = {"gain": gain, "shift": shift, "groups": groups, "backend": "reference"}
        return found_transport(q, k, v, Grouping(3), solve, **options, **b.masks)

    inputs = [b.x[name].clone().requires_grad_() for name in ("q", "k", "v", "gain", "shift")]
    assert torch.autograd.gradcheck(run, inputs)


@both
@pytest.mark.parametrize("junk", [float("nan"), 1e30])
def test_padding_and_other_samples_change_nothing(junk: float, backend: str) -> None:
    p = Problem(prefix=0, grid=(1, 40), window=None, masked=True)
    b = build(p)
    b.masks["key_mask"][1] = False
    clean = transport(b, backend)
    assert clean[1].abs().max() == 0
    for name, mask in (("q", "query_mask"), ("k", "key_mask"), ("v", "key_mask")):
        b.x[name] = b.x[name].masked_fill(~b.masks[mask][:, None, :, None], junk)
    assert torch.equal(transport(b, backend), clean)
    alone = build(replace(p, masked=False))
    alone.x = {name: t[:1] if t.dim() == 4 else t for name, t in b.x.items()}
    alone.masks = {name: t[:1] for name, t in b.masks.items()}
    torch.testing.assert_close(transport(alone, backend)[0], clean[0])
