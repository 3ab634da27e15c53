"""fp64 stays fp64: nothing on the way is computed in less."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lotformer.attention import build, names
from lotformer.nn import KeyMasses, PivotMeasure, PivotPooling, PrefixRows
from support.problems import lengths_mask
from support.small_zoo import DIM, HEADS, SMALL, make, tokens

LOT_OPTIONS = {  # key masses have a test of their own: the operator checks their sum in fp32
    "input-aware": {"learn_eps": True, "pivots": "input-aware"},
    "prefix": {"prefix_tokens": 2, "polarize_prefix": True, "local_conv": "1d"},
    "fixed masses": {"learn_masses": False, "mass_temperature": 0.3},
}


class NarrowFloats(TorchDispatchMode):
    """Collects the operators that make floating-point tensors of less than 64 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64:
                self.found.add(f"{func}: {leaf.dtype}")
        return out


def narrow_floats(mechanism, *, masked=True):
    n = 16
    inputs = [x.requires_grad_() for x in tokens(2, n)]
    mask = lengths_mask([n, 9], n) if masked else None
    with NarrowFloats() as seen:
        mechanism(*inputs, mask, mask).square().sum().backward()
    return seen.found


@pytest.mark.parametrize("name", names())
def test_every_mechanism_computes_in_the_precision_of_its_input(name):
    options = SMALL.get(name, {})
    assert narrow_floats(make(name, **options)) == set()


@pytest.mark.parametrize("solver", ["sinkhorn", "newton"])
@pytest.mark.parametrize("case", LOT_OPTIONS)
def test_every_part_of_lot_computes_in_the_precision_of_its_input(case, solver):
    assert narrow_floats(make("lot", rank=4, solver=solver, **LOT_OPTIONS[case])) == set()


def close(got, expected):
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


def test_pivot_masses_agree_with_their_formula_to_twelve_digits():
    measure = PivotMeasure(HEADS, 5, DIM, mass_temperature=0.3).double()
    with torch.no_grad():
        measure.logits.bias.normal_()
    points, log_masses = measure(tokens(1, 3)[0])
    weights = torch.exp(measure.logits.bias / 0.3)
    close(log_masses, torch.log(weights / weights.sum(-1, keepdim=True)))
    close(points, measure.points.bias.detach())


def test_polarised_rows_agree_with_their_formula_to_twelve_digits():
    q, k, v = tokens(1, 6)
    powers, beta = (1.5, 0.5), 0.8
    products = beta * q[:, :, :2, None, :] * k[:, :, None]
    scores = products.clamp_min(0).sum(-1) ** powers[0] + (-products).clamp_min(0).sum(-1) ** powers[1]
    weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
    close(PrefixRows(beta, polarize=True, powers=powers)(q[:, :, :2], k, v), weights @ v)


def test_key_masses_and_pooling_agree_with_their_formulas_to_twelve_digits():
    q, k, _ = tokens(2, 7)
    masses, pooling = KeyMasses(HEADS, DIM, "query-aware").double(), PivotPooling(HEADS, 3, DIM, pull=0.7).double()
    with torch.no_grad():
        masses.direction.bias.normal_()
    logits = (k @ (masses.direction.bias + DIM**-0.5 * q.mean(2))[..., None])[..., 0]
    close(masses(q, k), logits.exp() / logits.exp().sum(-1, keepdim=True))
    weights = (pooling.directions.bias @ k.mT).exp()
    close(pooling(k), pooling.pull.bias[:, None, None] * (weights / weights.sum(-1, keepdim=True) @ k))


def test_half_precision_parameters_meet_tokens_in_full_precision():
    measure = PivotMeasure(HEADS, 5, DIM).to(torch.bfloat16)
    points, log_masses = measure(torch.zeros(1, dtype=torch.bfloat16))
    assert points.dtype == log_masses.dtype == torch.float32
    assert build("lot", head_dim=DIM, num_heads=HEADS, rank=4).to(torch.bfloat16)(
        *tokens(1, 5, dtype=torch.bfloat16)
    ).dtype == torch.bfloat16  # fmt: skip
