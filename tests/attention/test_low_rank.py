"""Low-rank mechanisms agree with their definitions, written densely."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lotformer import attention
from lotformer.attention.nystromformer import segment_means
from lotformer.nn.inverse import iterative_pseudo_inverse
from support.dense import B, D, H, build, close, gaussian, softmax_matrix, tokens


@pytest.mark.parametrize("share", [False, True])
def test_linformer_is_softmax_over_combined_keys(share: bool) -> None:
    q, k, v = tokens(7, 9)
    module = build("linformer", rank=4, max_length=10, share_key_value=share)
    to_keys = module.key_projection[..., :9]
    to_values = to_keys if share else module.value_projection[..., :9]
    close(module(q, k, v), softmax_matrix(q, to_keys @ k) @ to_values @ v)


def test_linformer_refuses_sequences_longer_than_it_was_built_for() -> None:
    q, k, v = tokens(5, 11)
    with pytest.raises(ValueError, match=r"at most 10 keys, got 11.*max_length"):
        build("linformer", max_length=10)(q, k, v)


def test_nystromformer_with_a_landmark_per_token_is_softmax() -> None:
    q, k, v = tokens(9)
    module = build("nystromformer", landmarks=9, inverse_iters=40, conv_kernel=None)
    close(module(q, k, v), softmax_matrix(q, k) @ v, 1e-7)


@pytest.mark.parametrize(("n", "m"), [(12, 8), (11, 7), (3, 11)], ids=["divisible", "odd", "fewer-than-landmarks"])
def test_nystromformer_rebuilds_softmax_from_segment_means(n: int, m: int) -> None:
    q, k, v = tokens(n, m)

    def landmarks(x: Tensor) -> Tensor:
        length = x.shape[2]
        segment = torch.arange(length) * min(4, length) // length
        return torch.stack([x[:, :, segment == s].mean(2) for s in range(min(4, length))], 2)

    q_land, k_land = landmarks(q), landmarks(k)
    inverse = torch.linalg.pinv(softmax_matrix(q_land, k_land))
    expected = softmax_matrix(q, k_land) @ inverse @ softmax_matrix(q_land, k) @ v
    close(build("nystromformer", landmarks=4, inverse_iters=40, conv_kernel=None)(q, k, v), expected, 1e-8)


def test_nystromformer_adds_a_convolution_along_the_sequence_with_one_filter_per_head() -> None:
    q, k, v = tokens(12)
    module = build("nystromformer", landmarks=4, conv_kernel=5)
    plain = build("nystromformer", landmarks=4, conv_kernel=None)
    filters = module.local.conv.weight[:, 0]
    padded = F.pad(v, (0, 0, 2, 2))
    expected = sum(filters[:, t, None, None] * padded[:, :, t : t + 12] for t in range(5))
    close(module(q, k, v) - plain(q, k, v), expected)


def test_segment_means_skip_padding_wherever_it_is() -> None:
    x = torch.randn(1, 2, 11, 3, dtype=torch.float64)
    mask = torch.tensor([[1, 0, 1, 1, 0, 1, 1, 1, 0, 1, 0]], dtype=torch.bool)
    masked, used = segment_means(x.masked_fill(~mask[:, None, :, None], 0.0), mask, 3)
    kept, _ = segment_means(x[:, :, mask[0]], None, 3)
    close(masked, kept)
    assert used.all()


def test_iterative_inverse_is_the_pseudo_inverse_also_of_singular_matrices() -> None:
    low_rank = torch.rand(3, 5, 2, dtype=torch.float64) @ torch.rand(3, 2, 5, dtype=torch.float64)
    # more steps than needed only amplify rounding where there is no singular value
    close(iterative_pseudo_inverse(low_rank, 12), torch.linalg.pinv(low_rank, rtol=1e-9), 1e-8)


def test_kernelized_attention_is_the_unnormalised_gaussian_kernel() -> None:
    q, k, v = tokens(7, 9)
    close(build("kernelized")(q, k, v), gaussian(q, k) @ v)
    wide = torch.randn(B, H, 9, 3 * D, dtype=torch.float64)
    close(build("kernelized")(q, k, wide), gaussian(q, k) @ wide)


def test_kernelized_attention_keeps_precision_when_all_keys_are_far() -> None:
    q, k, v = tokens(7, 9)
    k = k + 12.0
    expected = gaussian(q, k) @ v
    assert expected.abs().max() < 1e-30
    torch.testing.assert_close(build("kernelized")(q, k, v), expected, rtol=1e-9, atol=0.0)


def test_skyformer_is_nystrom_of_the_gaussian_kernel_at_its_sampled_tokens() -> None:
    q, k, v = tokens(21, 17)
    module = build("skyformer", features=8, inverse_iters=40)
    picked = [x[:, :, (p * x.shape[2]).long()] for x, p in zip((q, k), module.positions, strict=True)]
    sampled = torch.cat(picked, 2)
    core = gaussian(sampled, sampled) + 0.1 * torch.eye(8, dtype=torch.float64)
    expected = gaussian(q, sampled) @ torch.linalg.inv(core) @ gaussian(sampled, k) @ v
    close(module(q, k, v), expected, 1e-8)


def test_skyformer_with_every_token_sampled_is_kernelized_attention() -> None:
    q, k, v = tokens(9, scale=2.0)
    module = build("skyformer", features=18, ridge=0.0, inverse_iters=60)
    close(module(q, k, v), build("kernelized")(q, k, v), 1e-7)


def test_skyformer_samples_each_stratum_once_and_redraws() -> None:
    module = attention.build("skyformer", head_dim=4, num_heads=1, features=20)
    assert torch.equal((module.positions * 10).floor(), torch.arange(10.0).expand(2, 10))
    before = module.positions.clone()
    module.redraw(torch.Generator().manual_seed(3))
    assert not torch.equal(before, module.positions)
