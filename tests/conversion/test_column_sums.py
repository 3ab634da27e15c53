"""Column sums of attention without its matrix: those of the matrix, for whatever is one."""

from __future__ import annotations

import pytest
import torch

from lotformer import attention
from lotformer.attention.diagnose import is_matrix
from lotformer.attention.masking import zero_padding
from lotformer.conversion.measuring.couplings import _Call, _column_sums
from support.problems import lengths_mask

CASES = [(name, {}) for name in attention.names()]
CASES += [
    ("lot", {"rank": 4, "window": "1d", "window_size": 5, "prefix_tokens": 1}),
    ("lot", {"rank": 4, "window": "2d"}),
    ("lot", {"rank": 4, "prefix_tokens": 2, "polarize_prefix": True}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_they_are_those_of_the_matrix(name, options, masked):
    mechanism = attention.build(name, head_dim=8, num_heads=2, **options).eval()
    if not is_matrix(mechanism):
        return
    mask = lengths_mask([16, 11], 16) if masked else None
    q, k, v = torch.randn(3, 2, 2, 16, 8)
    columns = zero_padding(torch.eye(16).expand(2, 2, 16, 16), mask)
    matrix = mechanism.forward(q, k, columns, mask, mask, grid=None)
    found = _column_sums(mechanism, _Call(q, k, v, mask, mask))
    torch.testing.assert_close(found, matrix.sum(-2), rtol=1e-4, atol=1e-4)
