"""Promise 6: wrong input gets one clear error that says what was expected, what came and what to do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import lotformer
from support.problems import make_inputs


def call(**changes):
    x = make_inputs(2, 3, 7, 5, rank=4, dim=8, dtype=torch.float32)
    arguments = {**x._asdict(), **changes}
    return lotformer.lot_attention(**arguments)


ones = torch.ones
WRONG = {
    "q of three dimensions": ({"q": ones(3, 7, 8)}, r"`q`: expected shape \(B, H, tokens, D\), got \(3, 7, 8\)"),
    "k with another batch": ({"k": ones(1, 3, 5, 8)}, r"`k`: expected \(2, 3, M, 8\).*got \(1, 3, 5, 8\)"),
    "k with other heads": ({"k": ones(2, 1, 5, 8)}, r"`k`: expected \(2, 3, M, 8\).*got \(2, 1, 5, 8\)"),
    "k with another width": ({"k": ones(2, 3, 5, 4)}, r"`k`: expected \(2, 3, M, 8\).*got \(2, 3, 5, 4\)"),
    "v of another length": ({"v": ones(2, 3, 6, 8)}, r"`v`: expected \(2, 3, 5, Dv\) to match k, got \(2, 3, 6, 8\)"),
    "pivots without heads": ({"pivots": ones(4, 8)}, r"`pivots`: expected shape \(H, R, D\) or .*got \(4, 8\)"),
    "pivots with other heads": ({"pivots": ones(2, 4, 8)}, r"`pivots`: expected \(3, R, 8\).*got \(2, 4, 8\)"),
    "pivots with another width": ({"pivots": ones(3, 4, 6)}, r"`pivots`: expected \(3, R, 8\).*got \(3, 4, 6\)"),
    "no pivot": ({"pivots": ones(3, 0, 8)}, "`pivots`: expected at least one pivot"),
    "log masses of another rank": ({"log_masses": ones(3, 5)}, r"`log_masses`: expected \(3, 4\), got \(3, 5\)"),
    "masses instead of log masses": ({"log_masses": ones(3, 4) / 4}, "log_masses.*sum to 1.*log_softmax"),
    "float mask": ({"key_mask": ones(2, 5)}, "`key_mask`: expected a boolean mask, True = a real token.*float32"),
    "additive mask": ({"query_mask": torch.zeros(2, 7)}, "`query_mask`: expected a boolean mask.*mask == 0"),
    "integer mask": ({"key_mask": ones(2, 5).long()}, "`key_mask`: expected a boolean mask.*mask.bool()"),
    "mask of another shape": ({"key_mask": ones(2, 7).bool()}, r"`key_mask`: expected \(2, 5\), got \(2, 7\)"),
    "four-dimensional mask": ({"key_mask": ones(2, 1, 1, 5).bool()}, r"`key_mask`: expected \(2, 5\)"),
    "eps of zero": ({"eps": 0.0}, "`eps`: expected a finite number above 0, got 0.0"),
    "negative eps": ({"eps": -1.0}, "`eps`: expected a finite number above 0, got -1.0"),
    "NaN eps": ({"eps": float("nan")}, "`eps`: expected a finite number above 0, got nan"),
    "infinite eps": ({"eps": float("inf")}, "`eps`: expected a finite number above 0, got inf"),
    "eps of another head count": ({"eps": ones(2)}, r"`eps`: expected a float or shape \(3,\), got \(2,\)"),
    "tensor eps with a zero": ({"eps": torch.tensor([1.0, 0.0, 1.0])}, "`eps`: expected finite numbers above 0"),
    "tensor eps with NaN": ({"eps": torch.tensor([1.0, float("nan"), 1.0])}, "`eps`: expected finite numbers above 0"),
    "unnormalised key masses": ({"key_masses": ones(2, 5)}, "`key_masses`: expected masses that sum to 1.*Divide"),
    "negative query masses": (
        {"query_masses": torch.tensor([2.0, -1, 0, 0, 0, 0, 0]).expand(2, 7)},
        "`query_masses`: expected numbers of at least 0",
    ),
    "NaN key masses": (
        {"key_masses": torch.full((2, 5), torch.nan)},
        "`key_masses`: expected numbers of at least 0",
    ),
    "masses of another shape": ({"key_masses": ones(2, 7) / 7}, r"`key_masses`: expected \(2, 5\) or \(2, 3, 5\)"),
    "mixed dtypes": (
        {"k": ones(2, 3, 5, 8).double()},
        "`k`: expected the dtype of q, torch.float32, got torch.float64",
    ),
    "integer q": ({"q": ones(2, 3, 7, 8).long()}, "`q`: expected a floating-point tensor, got torch.int64"),
    "mixed devices": ({"k": ones(2, 3, 5, 8, device="meta")}, "`k`: expected the device of q, cpu, got meta"),
    "pivots elsewhere": ({"pivots": ones(3, 4, 8, device="meta")}, "`pivots`: expected the device of q, cpu, got meta"),
    "unknown solver": ({"solver": "magic"}, "`solver`: expected 'sinkhorn' or 'newton', got 'magic'"),
    "no sweep": ({"iters": 0}, "`iters`: expected an integer of at least 1, got 0"),
    "half a sweep": ({"iters": 2.5}, "`iters`: expected an integer of at least 1, got 2.5"),
    "integer eps": ({"eps": torch.tensor(1)}, "`eps`: expected a floating-point tensor, got torch.int64"),
    "a list for the solver": ({"solver": ["newton"]}, r"`solver`: expected .*, got \['newton'\]"),
    "tol of zero": ({"tol": 0.0}, "`tol`: expected a number between 0 and 1"),
    "infinite scale": ({"scale": float("inf")}, "`scale`: expected a finite number, got inf"),
    "dropout of one": ({"dropout_p": 1.0}, r"`dropout_p`: expected a probability in \[0, 1\), got 1.0"),
    "causal": ({"is_causal": True}, r"cannot be causal.*last column.*A\[n,n\] = 1.*identity"),
    "unknown backend": ({"backend": "abacus"}, "`backend`: expected None or one of .*'reference', got 'abacus'"),
}


numbers = np.ones((2, 3, 7, 8), np.float32)
WRONG_KIND = {
    "numpy queries": ({"q": numbers}, r"`q`: expected a tensor, got numpy.ndarray. Use `torch.as_tensor\(q\)`"),
    "numpy pivots": ({"pivots": numbers[0]}, r"`pivots`: expected a tensor, got numpy.ndarray"),
    "no values": ({"v": None}, "`v`: expected a tensor, got NoneType"),
    "list mask": ({"key_mask": [[True] * 5] * 2}, r"`key_mask`: expected a tensor, got list. Use `torch.as_tensor\("),
    "list masses": ({"query_masses": [[1 / 7] * 7] * 2}, "`query_masses`: expected a tensor, got list"),
    "text for eps": ({"eps": "small"}, "`eps`: expected a number or a tensor with one per head, got str"),
    "list for eps": ({"eps": [1.0, 1.0, 1.0]}, "`eps`: expected a number or a tensor with one per head, got list"),
    "text for tol": ({"tol": "1e-6"}, "`tol`: expected a number or None, got str"),
    "tensor for scale": ({"scale": ones(3)}, "`scale`: expected a number or None, got torch.Tensor"),
    "text for dropout": ({"dropout_p": "0.1"}, "`dropout_p`: expected a number, got str"),
}


@pytest.mark.parametrize("case", WRONG_KIND)
def test_the_operator_refuses_kinds_of_arguments(case):
    changes, message = WRONG_KIND[case]
    with pytest.raises(TypeError, match=message):
        call(**changes)


def test_a_coupling_refuses_like_the_operator():
    q, k, _, pivots, log_masses = make_inputs(2, 3, 7, 5)
    with pytest.raises(TypeError, match=r"`k`: expected a tensor, got numpy\.ndarray"):
        lotformer.coupling(q, k.numpy(), pivots, log_masses)
    with pytest.raises(ValueError, match=r"`pivots`: expected \(3, R, 8\)"):
        lotformer.coupling(q, k, pivots[:2], log_masses)


def test_numbers_of_numpy_are_numbers():
    x = make_inputs(2, 3, 7, dtype=torch.float32)
    got = lotformer.lot_attention(*x, eps=np.float32(0.5), scale=np.float64(2))
    assert torch.equal(got, lotformer.lot_attention(*x, eps=0.5, scale=2.0))


@pytest.mark.parametrize("case", WRONG)
def test_the_operator_refuses(case):
    changes, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        call(**changes)


def test_the_unchanged_call_works():
    assert call().shape == (2, 3, 7, 8)


def test_an_inverted_mask_shows_in_the_error_when_it_cannot_be_right():
    """True = padding is the other convention; with masses it is caught, because they do not sum to one there."""
    padding = torch.tensor([[False, False, False, False, True]] * 2)
    masses = (~padding).float() / 4
    with pytest.raises(ValueError, match=r"key_masses.*sum to 1 over the real tokens"):
        call(key_mask=padding, key_masses=masses)


LAYER_WRONG = {
    "heads that do not divide": ({"dim": 10, "num_heads": 3}, "dim must be a multiple of num_heads"),
    "rank of zero": ({"rank": 0}, "rank must be at least 1, got 0"),
    "a rank that is no integer": ({"rank": 8.0}, r"rank must be an integer, got 8\.0"),
    "a rank in words": ({"rank": "8"}, "rank must be an integer, got '8'"),
    "sweeps that are no integer": ({"iters": 2.5}, r"iters must be an integer, got 2\.5"),
    "a prefix that is no integer": ({"prefix_tokens": 1.0}, r"prefix_tokens must be an integer, got 1\.0"),
    "heads that are no integer": ({"num_heads": 2.0}, r"num_heads must be an integer, got 2\.0"),
    "a kernel that is no integer": (
        {"local_conv": "1d", "kernel_size": 3.0},
        r"kernel_size must be an integer, got 3\.0",
    ),
    "eps of zero": ({"eps": 0.0}, "eps must be above 0, got 0.0"),
    "unknown key masses": ({"key_masses": "heavy"}, "key_masses must be one of 'uniform'"),
    "unknown pivot init": ({"pivot_init": "zeros"}, "init must be one of 'small'"),
    "unknown convolution": ({"local_conv": "3d"}, "local_conv must be None, '1d' or '2d'"),
    "even kernel": ({"local_conv": "1d", "kernel_size": 4}, "kernel_size must be odd"),
    "unknown solver": ({"solver": "magic"}, "solver must be one of 'sinkhorn', 'newton', got 'magic'"),
    "no sweep": ({"iters": 0}, "iters must be at least 1, got 0"),
    "dropout of one": ({"attn_drop": 1.0}, r"dropout must be a probability in \[0, 1\), got 1.0"),
    "negative prefix": ({"prefix_tokens": -1}, "prefix_tokens must be at least 1, got -1"),
    "polarised nothing": ({"polarize_prefix": True}, "polarize_prefix=True needs a prefix: prefix_tokens=1"),
    "beta of zero": ({"prefix_tokens": 1, "prefix_beta": 0.0}, "prefix_beta must be above 0"),
    "mass temperature of zero": ({"mass_temperature": 0.0}, "mass_temperature must be above 0"),
}


@pytest.mark.parametrize("case", LAYER_WRONG)
def test_the_layer_refuses(case):
    changes, message = LAYER_WRONG[case]
    with pytest.raises(ValueError, match=message):
        lotformer.LOTAttention(**{"dim": 16, "num_heads": 2, **changes})


def test_the_layer_refuses_wrong_inputs_of_forward():
    layer = lotformer.LOTAttention(16, 2, rank=4, local_conv="2d")
    with pytest.raises(ValueError, match=r"`x`: expected \(B, N, 16\), got \(2, 9, 8\)"):
        layer(torch.ones(2, 9, 8))
    with pytest.raises(ValueError, match="10 tokens do not form a square: pass grid"):
        layer(torch.ones(2, 10, 16))
    with pytest.raises(ValueError, match="a grid of 3×4 has 12 tokens, but there are 10"):
        layer(torch.ones(2, 10, 16), grid=(3, 4))
    with pytest.raises(ValueError, match="prefix_tokens=4, but the sequence has 3 tokens"):
        lotformer.LOTAttention(16, 2, rank=4, prefix_tokens=4)(torch.ones(2, 3, 16))
    with pytest.raises(ValueError, match="cannot be causal"):
        layer(torch.ones(2, 9, 16), is_causal=True)
    for other in (
        layer,
        lotformer.LOTAttention(16, 2, key_masses="linear"),
        lotformer.AttentionLayer(16, 2, "softmax"),
    ):
        with pytest.raises(ValueError, match="boolean mask"):
            other(torch.ones(2, 9, 16), mask=torch.ones(2, 9))
        with pytest.raises(ValueError, match=r"boolean mask \(2, 9\).*got torch.bool \(2, 8\)"):
            other(torch.ones(2, 9, 16), mask=torch.ones(2, 8).bool())


def test_an_unknown_mechanism_is_refused_with_a_suggestion():
    with pytest.raises(ValueError, match=r"Unknown mechanism 'sofmax'\. Did you mean 'softmax'"):
        lotformer.AttentionLayer(16, 2, "sofmax")


def test_a_causal_call_of_another_mechanism_does_not_blame_lot():
    with pytest.raises(ValueError, match="this layer looks both ways"):
        lotformer.AttentionLayer(16, 2, "softmax")(torch.ones(2, 9, 16), is_causal=True)
