"""Translation models: fairseq's architecture, differential attention everywhere, padding that never leaks."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

import lotformer
from lotformer.attention.diff import DifferentialAttention
from lotformer_paper.models.translation import BACKBONES, DifferentialMarianAttention, DiffMarianMTModel, build

PAD, EOS = 1, 2


def model(backbone: str):
    torch.manual_seed(0)
    return build(backbone, "tiny", vocabulary=40, positions=64).eval()


def sentences() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, 40, (3, 7), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    mask[2, 1:] = 0
    shown = torch.cat([torch.full((3, 1), EOS), torch.randint(4, 40, (3, 5), generator=generator)], 1)
    return {"input_ids": ids.where(mask.bool(), PAD), "attention_mask": mask, "decoder_input_ids": shown}


def alone(batch: dict[str, torch.Tensor], index: int) -> dict[str, torch.Tensor]:
    real = batch["attention_mask"][index].bool()
    return {
        "input_ids": batch["input_ids"][index : index + 1, real],
        "decoder_input_ids": batch["decoder_input_ids"][index : index + 1],
    }


def test_the_iwslt_size_is_fairseqs():
    with torch.device("meta"):
        config = build("transformer", "iwslt", vocabulary=10_000).config
    assert (config.encoder_layers, config.decoder_layers) == (6, 6)
    assert (config.d_model, config.encoder_ffn_dim, config.decoder_ffn_dim) == (512, 1024, 1024)
    assert (config.encoder_attention_heads, config.decoder_attention_heads) == (4, 4)
    assert (config.activation_function, config.dropout, config.attention_dropout) == ("relu", 0.3, 0.0)
    assert config.scale_embedding
    assert config.tie_word_embeddings
    assert not config.share_encoder_decoder_embeddings


@pytest.mark.parametrize("backbone", BACKBONES)
@torch.no_grad()
def test_the_output_is_tied_to_the_decoder_and_weights_are_fairseqs(backbone):
    made = model(backbone)
    assert made.lm_head.weight is made.model.decoder.embed_tokens.weight
    assert made.lm_head.weight is not made.model.encoder.embed_tokens.weight
    for half in (made.model.encoder, made.model.decoder):
        table = half.embed_tokens.weight
        assert not table[PAD].any()
        assert table.std() == pytest.approx(32**-0.5, rel=0.1)
    post_norm = made.model.encoder.layers[0]
    normed = post_norm(torch.randn(2, 3, 32), None)
    torch.testing.assert_close(normed.mean(-1), torch.zeros(2, 3), atol=1e-5, rtol=0)


@pytest.mark.parametrize("converted", [False, True], ids=["softmax", "LOT"])
@pytest.mark.parametrize("backbone", BACKBONES)
@torch.no_grad()
def test_padding_never_leaks(backbone, converted):
    made, batch = model(backbone), sentences()
    if converted:
        lotformer.convert(made, rank=4, pivot_init="unit")
    together = made(**batch).logits
    dirty = {**batch, "input_ids": batch["input_ids"].where(batch["attention_mask"].bool(), 17)}
    assert torch.equal(made(**dirty).logits, together)
    for index in range(3):
        torch.testing.assert_close(
            together[index : index + 1], made(**alone(batch, index)).logits, atol=1e-5, rtol=1e-4
        )


@pytest.mark.parametrize("backbone", BACKBONES)
@torch.no_grad()
def test_the_decoder_looks_back_only_and_its_cache_changes_nothing(backbone):
    made, batch = model(backbone), sentences()
    whole = made(**batch).logits
    shorter = made(**{**batch, "decoder_input_ids": batch["decoder_input_ids"][:, :3]}).logits
    torch.testing.assert_close(whole[:, :3], shorter)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    cached, plain = (made.generate(**inputs, num_beams=3, max_new_tokens=6, use_cache=use) for use in (True, False))
    assert torch.equal(cached, plain)


@torch.no_grad()
def test_every_attention_differentiates_as_the_mechanism_does():
    made = model("diff")
    modules = [m for m in made.modules() if isinstance(m, DifferentialMarianAttention)]
    assert len(modules) == 3  # one layer a half: encoder, decoder, between them
    module = made.model.encoder.layers[0].self_attn
    same = DifferentialAttention(16, 2, layer=0)
    same.query_lambda.copy_(module.query_lambda)
    same.key_lambda.copy_(module.key_lambda)
    module.head_norm.copy_(torch.linspace(0.5, 1.5, 16))
    same.norm.copy_(module.head_norm)
    assert module.balance() == same.balance()
    x = torch.randn(2, 5, 32)
    q, k, v = (
        project(x).unflatten(-1, (2, 16)).transpose(1, 2) for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    expected = module.out_proj(same(q, k, v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x)[0], expected, atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_lambda_begins_as_published():
    torch.manual_seed(0)
    with torch.device("meta"):
        made = build("diff", "iwslt", vocabulary=50, positions=8)
    for half in (made.model.encoder, made.model.decoder):
        starts = [layer.self_attn.start for layer in half.layers]
        assert starts == pytest.approx([0.2, 0.35551, 0.47071, 0.55606, 0.61928, 0.66612], abs=1e-5)
    module = model("diff").model.decoder.layers[0].encoder_attn
    assert 0.05 < float(torch.stack([module.query_lambda, module.key_lambda]).std()) < 0.15
    assert (module.head_norm == 1).all()


@pytest.mark.parametrize("converted", [False, True], ids=["softmax", "LOT"])
@torch.no_grad()
def test_a_diff_transformer_loads_as_it_was_saved(tmp_path, converted):
    made, batch = model("diff"), sentences()
    if converted:
        report = lotformer.convert(made, rank=4)
        assert [layer.name for layer in report.converted] == ["model.encoder.layers.0.self_attn"]
    made.save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    assert isinstance(again, DiffMarianMTModel)
    assert torch.equal(again(**batch).logits, made(**batch).logits)


@pytest.mark.parametrize(("backbone", "size"), [("rnn", "tiny"), ("diff", "huge")])
def test_unknown_names_are_refused(backbone, size):
    with pytest.raises(ValueError, match="must be one of"):
        build(backbone, size, vocabulary=10)
