"""Padding never leaks through a converted model, whatever form its mask comes in; other masks are refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lotformer
from lotformer.attention.host_masks import key_mask_from
from support.small_models import SMALL, output, torch_encoder

REAL = {
    "right": [[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]],
    "left": [[1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1]],
    "both": [[0, 1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 0, 0]],
    "none": [[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]],
}
FORMS = {
    "2d-int": lambda real: real.long(),
    "2d-bool": lambda real: real,
    "2d-float": lambda real: real.float(),
    "4d-bool-row": lambda real: real[:, None, None, :],
    "4d-bool-square": lambda real: real[:, None, None, :].repeat(1, 1, real.shape[1], 1),
    "4d-bool-expanded": lambda real: real[:, None, None, :].expand(-1, -1, real.shape[1], -1),
    "4d-bool-outer": lambda real: real[:, None, None, :] & real[:, None, :, None],
    "4d-additive-row": lambda real: torch.zeros(real.shape).masked_fill(~real, -torch.inf)[:, None, None, :],
    "4d-additive-square": lambda real: (
        torch.zeros(real.shape)
        .masked_fill(~real, torch.finfo(torch.float32).min)[:, None, None, :]
        .repeat(1, 1, real.shape[1], 1)
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("side", REAL)
def test_every_form_of_padding_mask_names_the_same_keys(form, side):
    real = torch.tensor(REAL[side]).bool()
    got = key_mask_from(FORMS[form](real), 2, 7, 7)
    assert got is not None
    assert torch.equal(got, real)


@pytest.mark.parametrize("kind", ["bert", "distilbert", "electra", "modernbert", "marian"])
@pytest.mark.parametrize("side", ["right", "left", "both"])
def test_the_contents_of_padding_never_matter(kind, side):
    small = SMALL[kind]
    model, batch = small.build(), small.batch()
    real = torch.tensor(REAL[side]).bool()
    ids = torch.randint(3, 60, (2, 7))
    lotformer.convert(model, rank=5, pivot_init="unit")
    results = []
    for filler in (5, 41):
        inputs = {**batch, "input_ids": ids.masked_fill(~real, filler), "attention_mask": real.long()}
        result = output(model, inputs)
        results.append(result[real] if result.shape[:2] == real.shape else result)
    assert torch.equal(*results)


@pytest.mark.parametrize("form", [name for name in FORMS if name != "2d-float"])
@pytest.mark.parametrize("side", ["right", "left", "both"])
def test_a_padded_batch_equals_its_sequences_one_by_one(form, side):
    model = SMALL["bert"].build()
    lotformer.convert(model, rank=5, pivot_init="unit", tol=1e-6)
    real = torch.tensor(REAL[side]).bool()
    ids = torch.randint(3, 60, (2, 7))
    positions = (real.long().cumsum(-1) - 1).clamp_min(0)
    batched = output(model, {"input_ids": ids, "attention_mask": FORMS[form](real), "position_ids": positions})
    for row in range(2):
        alone = output(model, {"input_ids": ids[row, real[row]][None]})
        torch.testing.assert_close(batched[row, real[row]], alone[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("as_float", [False, True], ids=["bool", "additive"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["sequence-first", "batch-first"])
def test_padding_of_pytorch_encoders_never_matters(as_float, batch_first):
    layer = torch.nn.TransformerEncoderLayer(24, 4, 20, batch_first=batch_first)
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    lotformer.convert(encoder, rank=5, pivot_init="unit")
    real = torch.tensor(REAL["both"]).bool()
    padding = torch.zeros(2, 7).masked_fill(~real, -torch.inf) if as_float else ~real
    x = torch.randn(2, 7, 24)
    results = []
    for filler in (0.0, 1e3):
        y = x.masked_fill(~real[..., None], filler)
        with torch.no_grad():
            out = encoder(y if batch_first else y.transpose(0, 1), src_key_padding_mask=padding)
        results.append((out if batch_first else out.transpose(0, 1))[real])
    assert torch.equal(*results)


OTHERS = {
    "causal": (torch.ones(7, 7).tril().bool()[None, None], "different sets of keys"),
    "causal-heads": (torch.ones(7, 7).tril().bool()[None, None].expand(2, 3, 7, 7), "different sets of keys"),
    "band": (torch.ones(7, 7).triu(-1).tril(1).bool()[None, None], "different sets of keys"),
    "causal-additive": (
        torch.zeros(7, 7).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)[None, None],
        "different sets",
    ),
    "position-bias": (torch.randn(1, 3, 7, 7), "adds finite numbers"),
    "flat-bias": (-torch.rand(2, 7), "adds finite numbers"),
    "per-head": (torch.stack([torch.ones(7), torch.arange(7) < 4]).bool()[None, :, None, :], "heads see different"),
}


class TestOtherMasksAreRefused:
    @pytest.mark.parametrize("kind", OTHERS)
    def test_with_the_reason(self, kind):
        mask, why = OTHERS[kind]
        with pytest.raises(ValueError, match=f"not a pure padding mask.*{why}"):
            key_mask_from(mask, 2, 7, 7)

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    @pytest.mark.parametrize("kind", OTHERS)
    def test_inside_compiled_code_without_breaking_the_graph(self, kind, backend):
        torch._dynamo.reset()
        mask, why = OTHERS[kind]
        compiled = torch.compile(key_mask_from, backend=backend, fullgraph=True)
        harmless = torch.ones_like(mask) if mask.dtype == torch.bool else torch.zeros_like(mask)
        assert bool(compiled(harmless, 2, 7, 7).all())
        with pytest.raises(RuntimeError, match=f"not a pure padding mask.*{why}"):
            compiled(mask, 2, 7, 7)

    def test_a_wrong_shape(self):
        with pytest.raises(ValueError, match=r"expected \(B, 7\)"):
            key_mask_from(torch.ones(2, 6), 2, 7, 7)

    def test_through_a_converted_bert(self):
        model = SMALL["bert"].build()
        lotformer.convert(model, rank=5)
        causal = torch.ones(7, 7).tril().bool().expand(2, 1, 7, 7)
        with pytest.raises(ValueError, match="not a pure padding mask"):
            output(model, {"input_ids": torch.randint(3, 60, (2, 7)), "attention_mask": causal})

    def test_through_a_converted_pytorch_encoder(self):
        encoder = torch_encoder()
        lotformer.convert(encoder, rank=5)
        causal = torch.nn.Transformer.generate_square_subsequent_mask(7)
        with pytest.raises(ValueError, match="causal"):
            encoder(torch.randn(2, 7, 24), mask=causal, is_causal=True)
        with pytest.raises(ValueError, match=r"not a pure padding mask|causal"):
            encoder(torch.randn(2, 7, 24), mask=causal)

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    @pytest.mark.parametrize("as_float", [False, True], ids=["bool", "additive"])
    def test_through_compiled_multihead_attention(self, as_float, backend):
        torch._dynamo.reset()
        layer = torch.nn.MultiheadAttention(24, 4, batch_first=True).eval()
        lotformer.convert(layer, rank=5, solver="sinkhorn")
        compiled = torch.compile(lambda x, mask: layer(x, x, x, attn_mask=mask)[0], backend=backend, fullgraph=True)
        causal, x = torch.ones(7, 7).triu(1).bool(), torch.randn(2, 7, 24)
        hidden = torch.arange(7).expand(7, 7) > 4
        if as_float:
            causal, hidden = (torch.zeros(7, 7).masked_fill(mask, -torch.inf) for mask in (causal, hidden))
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, hidden), layer(x, x, x, attn_mask=hidden)[0])
            with pytest.raises(RuntimeError, match="not a pure padding mask"):
                compiled(x, causal)

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_through_a_compiled_bert(self, backend):
        torch._dynamo.reset()
        model = SMALL["bert"].build()
        lotformer.convert(model, rank=5, solver="sinkhorn")
        compiled = torch.compile(model, backend=backend)
        ids, everything = torch.randint(3, 60, (2, 7)), torch.ones(2, 1, 7, 7, dtype=torch.bool)
        batch = {"input_ids": ids, "attention_mask": everything}
        torch.testing.assert_close(output(compiled, batch), output(model, batch))
        with pytest.raises(RuntimeError, match="not a pure padding mask"):
            output(compiled, {"input_ids": ids, "attention_mask": everything.tril()})


@pytest.mark.parametrize("side", REAL)
@pytest.mark.parametrize("kind", ["0/1", "additive"])
def test_flat_masks_in_floating_point_are_read_alike_by_eager_and_compiled_code(kind, side):
    real = torch.tensor(REAL[side]).bool()
    mask = real.float() if kind == "0/1" else torch.zeros(2, 7).masked_fill(~real, -torch.inf)
    compiled = torch.compile(key_mask_from, backend="eager", fullgraph=True)
    for read in (key_mask_from, compiled):
        assert torch.equal(read(mask, 2, 7, 7), real)


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4))
def test_square_masks_of_any_padding_reduce_to_it(rows):
    real = torch.tensor(rows)
    square = real[:, None, None, :] & real[:, None, :, None]
    got = key_mask_from(square, len(rows), 5, 5)
    assert got is not None
    assert torch.equal(got, real)
