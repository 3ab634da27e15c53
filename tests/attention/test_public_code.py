"""Mechanisms against the public code that is installed here: the same numbers from the same parameters."""

from __future__ import annotations

import pytest
import torch

from support.small_models import transformers  # imported there with care for torchvision
from support.small_zoo import DIM, HEADS, assert_equal, make

Mamba2Mixer = transformers.models.mamba2.modeling_mamba2.Mamba2Mixer
LSHSelfAttention = transformers.models.reformer.modeling_reformer.LSHSelfAttention
WIDTH = HEADS * DIM


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (HEADS, DIM)).transpose(1, 2)


@pytest.mark.parametrize(("num_hashes", "chunks_before"), [(1, 0), (3, 0), (1, 1)])
def test_reformer_is_the_lsh_attention_of_hugging_face(num_hashes, chunks_before):
    theirs = LSHSelfAttention(
        transformers.ReformerConfig(
            hidden_size=WIDTH, attention_head_size=DIM, num_attention_heads=HEADS, num_hashes=num_hashes,
            num_buckets=4, lsh_attn_chunk_length=4, lsh_num_chunks_before=chunks_before, attn_layers=["lsh"],
            is_decoder=False, lsh_attention_probs_dropout_prob=0.0,
        )
    ).double().eval()  # fmt: skip
    ours = make("reformer", num_hashes=num_hashes, num_buckets=4, chunk_size=4, chunks_before=chunks_before)
    x = torch.randn(2, 16, WIDTH, dtype=torch.float64)
    q, v = heads(theirs.query_key(x)), heads(theirs.value(x))
    bucket = ours.buckets(q, None)
    # theirs sorts all rounds at once, by round first
    rounds = (bucket + 4 * torch.arange(num_hashes)[:, None]).flatten(2)
    expected = heads(theirs(x, buckets=rounds).hidden_states)
    got = ours(q, q, v)
    if chunks_before:  # the first chunk looks back at the last one there, and at nothing here
        later = bucket[:, :, 0].argsort(dim=-1, stable=True)[..., 4:, None].expand(-1, -1, -1, DIM)
        got, expected = got.gather(2, later), expected.gather(2, later)
    assert_equal(expected, got, 1e-4)  # theirs adds 1e-6 to the squared length of the keys


def test_mamba2_is_the_mixer_of_hugging_face():
    config = transformers.Mamba2Config(
        num_heads=HEADS, head_dim=DIM, hidden_size=WIDTH, state_size=DIM, expand=1, n_groups=HEADS, conv_kernel=4,
        chunk_size=8, layer_norm_epsilon=1e-5, num_hidden_layers=1,
    )  # fmt: skip
    theirs = Mamba2Mixer(config, 0).double().eval()
    ours = make("mamba2", bidirectional=False, chunk_size=8)
    w_q, w_k, w_v = torch.randn(3, HEADS, DIM, WIDTH, dtype=torch.float64) * WIDTH**-0.5
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        # here the gate is made of the query and the step of the key, so there both are given such weights
        w_gate = ours.gate.mT @ w_q
        w_step = (ours.step[:, None] @ w_k)[:, 0]
        theirs.in_proj.weight.copy_(torch.cat([*(w.flatten(0, 1) for w in (w_gate, w_v, w_k, w_q)), w_step]))
        conv_q, conv_k, conv_v = (conv.conv for conv in ours.convs)
        theirs.conv1d.weight.copy_(torch.cat([conv.weight for conv in (conv_v, conv_k, conv_q)]))
        theirs.conv1d.bias.copy_(torch.cat([conv.bias for conv in (conv_v, conv_k, conv_q)]))
        theirs.dt_bias.copy_(ours.step_bias)
        theirs.A_log.copy_(ours.log_rate)
        theirs.D.copy_(ours.skip)
        theirs.norm.weight.copy_(ours.norm)
        theirs.out_proj.weight.copy_(torch.eye(WIDTH))
    x = torch.randn(2, 19, WIDTH, dtype=torch.float64)
    q, k, v = (torch.einsum("bnc,hdc->bhnd", x, w) for w in (w_q, w_k, w_v))
    expected = theirs(x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    assert_equal(expected, ours(q, k, v).transpose(1, 2).flatten(2), 1e-5)  # theirs computes in fp32
