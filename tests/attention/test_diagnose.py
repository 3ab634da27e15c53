"""The diagnosis of an attention matrix: sums, entropy, rank and the share of the heaviest token."""

from __future__ import annotations

import math

import pytest
import torch

from lotformer import attention
from lotformer.attention import attention_matrix, diagnose

D = 6


def tokens(n: int = 7, m: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 3, n, D), torch.randn(2, 3, m, D), torch.randn(2, 3, m, 4)


@pytest.mark.parametrize("name", attention.names())
def test_the_matrix_is_what_the_mechanism_applies_or_there_is_a_clear_refusal(name: str) -> None:
    entry = attention.entry(name)
    q, k, v = tokens(9, 9)
    if not entry.is_matrix:
        with pytest.raises(ValueError, match="not one matrix per head"):
            diagnose(name, q, k)
        return
    module = attention.build(name, head_dim=D, num_heads=3)
    torch.manual_seed(1)
    matrix = attention_matrix(module, q, k)
    torch.manual_seed(1)
    values = torch.nn.functional.pad(v, (0, D - v.shape[-1]))
    torch.testing.assert_close(matrix @ values, module.eval()(q, k, values), rtol=1e-4, atol=1e-5)


def test_it_measures_softmax_attention_as_written_down() -> None:
    q, k, _ = tokens(6, 8)
    a = (q @ k.mT * D**-0.5).softmax(-1)
    found = diagnose("softmax", q, k)
    torch.testing.assert_close(found.row_sums, torch.ones(2, 3, 6))
    torch.testing.assert_close(found.column_sums, a.sum(-2))
    torch.testing.assert_close(found.entropy, -(a * a.log()).sum(-1).mean(-1))
    torch.testing.assert_close(found.top_share, a.sum(-2).amax(-1) / 6)
    spectrum = torch.linalg.svdvals(a)
    spectrum = spectrum / spectrum.sum(-1, keepdim=True)
    torch.testing.assert_close(found.effective_rank, (-(spectrum * spectrum.log()).sum(-1)).exp())


def test_even_attention_has_full_entropy_and_rank_one() -> None:
    q, k, _ = tokens()
    found = diagnose("softmax", torch.zeros_like(q), k)
    torch.testing.assert_close(found.entropy, torch.full((2, 3), math.log(7)))
    torch.testing.assert_close(found.effective_rank, torch.ones(2, 3), rtol=0, atol=1e-4)
    torch.testing.assert_close(found.top_share, torch.full((2, 3), 1 / 7))


def test_a_permutation_has_no_entropy_and_full_rank_with_even_columns() -> None:
    apart = 1e3 * torch.eye(7).expand(1, 1, 7, 7)
    found = diagnose("softmax", apart, apart)
    assert found.entropy.item() == pytest.approx(0.0, abs=1e-6)
    assert found.effective_rank.item() == pytest.approx(7.0, abs=1e-4)
    assert found.top_share.item() == pytest.approx(1 / 7)


def test_overfocusing_shows_as_the_share_of_one_token() -> None:
    q, k, _ = tokens()
    k = torch.zeros_like(k)
    k[:, :, 2] = 100.0
    found = diagnose("softmax", torch.ones_like(q), k)
    torch.testing.assert_close(found.top_share, torch.ones(2, 3))
    assert (diagnose("espformer-hard", torch.ones_like(q), k).top_share < 0.2).all()


def test_padding_is_left_out() -> None:
    q, k, _ = tokens()
    mask = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    found = diagnose("softmax", q, k, key_mask=mask, query_mask=mask)
    short = diagnose("softmax", q[1:, :, :4], k[1:, :, :4])
    torch.testing.assert_close(found.entropy[1:], short.entropy)
    torch.testing.assert_close(found.effective_rank[1:], short.effective_rank)
    torch.testing.assert_close(found.top_share[1:], short.top_share)
    assert not found.row_sums[1, :, 4:].any()
    assert not found.column_sums[1, :, 4:].any()


def test_options_that_remove_the_odd_part_make_it_a_matrix() -> None:
    q, k, _ = tokens(9, 9)
    assert diagnose("flatten", q, k, local_conv=False).entropy.shape == (2, 3)
    with pytest.raises(ValueError, match="not one matrix per head"):
        diagnose("lot", q, k, local_conv="1d")


def test_options_go_with_names_only() -> None:
    q, k, _ = tokens()
    module = attention.build("softmax", head_dim=D, num_heads=3)
    with pytest.raises(ValueError, match="options \\(scale\\)"):
        diagnose(module, q, k, scale=2.0)


def test_a_module_stays_in_its_mode() -> None:
    q, k, _ = tokens()
    module = attention.build("softmax", head_dim=D, num_heads=3, dropout=0.9).train()
    found = diagnose(module, q, k)
    assert module.training
    torch.testing.assert_close(found.row_sums, torch.ones(2, 3, 7))


def test_it_is_printed_as_a_line_per_figure() -> None:
    q, k, _ = tokens(50, 70)
    text = repr(diagnose("softmax", q, k))
    assert "2 × 3 matrices of 50 × 70" in text
    assert len(text.splitlines()) == 6
    assert "row_sums:       mean 1, from 1 to 1" in text


@pytest.mark.parametrize("q", [torch.randn(3, 7, D), torch.randn(7, D), None], ids=["3-d", "2-d", "none"])
def test_tokens_without_heads_are_refused(q: torch.Tensor | None) -> None:
    with pytest.raises(ValueError, match=r"`q`: expected a tensor \(B, H, tokens, D\), got"):
        diagnose("lot", q, q)  # type: ignore[arg-type]
