"""Whatever part of a model was converted, saving what encloses it or what it encloses keeps the conversion."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Normalize, Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

import lotformer
from lotformer.conversion.hosts.sites import converted
from support.small_models import SMALL, output

pytestmark = pytest.mark.small_windows


def saved_and_loaded(model, folder: Path):
    """The model as the next process would see it, and its config.json naming what it needs."""
    model.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["attn_implementation"] == "lotformer"
    return type(model).from_pretrained(folder).eval()


def check(model, batch, folder: Path) -> None:
    again = saved_and_loaded(model, folder)
    assert [name for name, _ in converted(again)] == [name for name, _ in converted(model)] != []
    assert torch.equal(output(again, batch), output(model, batch))


def test_the_body_of_a_classifier(tmp_path):
    model, batch = SMALL["bert-classifier"].build(), SMALL["bert-classifier"].batch()
    lotformer.convert(model.bert, rank=5)
    check(model, batch, tmp_path / "whole")
    check(model.bert, batch, tmp_path / "body")


def test_a_classifier_saved_by_its_body(tmp_path):
    model, batch = SMALL["bert-classifier"].build(), SMALL["bert-classifier"].batch()
    lotformer.convert(model, rank=5)
    check(model.bert, batch, tmp_path / "body")
    check(model, batch, tmp_path / "whole")


def test_the_stack_of_layers_alone(tmp_path):
    model, batch = SMALL["bert-classifier"].build(), SMALL["bert-classifier"].batch()
    lotformer.convert(model.bert.encoder, rank=5)
    check(model, batch, tmp_path)


def test_the_encoder_of_a_translator(tmp_path):
    model, batch = SMALL["marian"].build(), SMALL["marian"].batch()
    lotformer.convert(model.model.encoder, rank=5)
    check(model, batch, tmp_path)


def test_a_wrapper_that_is_no_hugging_face_model(tmp_path):
    body, batch = SMALL["bert"].build(), SMALL["bert"].batch()
    lotformer.convert(nn.ModuleDict({"body": body, "head": nn.Linear(24, 2)}), rank=5)
    check(body, batch, tmp_path)


def test_a_model_built_around_a_converted_one(tmp_path):
    encoder, decoder = SMALL["bert"].build(), transformers.BertLMHeadModel(
        transformers.BertConfig(
            hidden_size=24, num_hidden_layers=1, num_attention_heads=3, intermediate_size=20, vocab_size=60,
            is_decoder=True, add_cross_attention=True,
        )
    )  # fmt: skip
    lotformer.convert(encoder, rank=5)
    batch = {**SMALL["bert"].batch(), "decoder_input_ids": torch.randint(3, 60, (2, 4))}
    check(transformers.EncoderDecoderModel(encoder=encoder, decoder=decoder).eval(), batch, tmp_path)


def test_parts_with_different_settings_are_refused(tmp_path):
    model = SMALL["bert"].build()
    lotformer.convert(model.encoder.layer[0], rank=5)
    lotformer.convert(model.encoder.layer[1], rank=6)
    with pytest.raises(ValueError, match="different settings"):
        model.save_pretrained(tmp_path)


def test_a_part_that_is_reverted(tmp_path):
    model, batch = SMALL["bert-classifier"].build(), SMALL["bert-classifier"].batch()
    before = output(model, batch)
    lotformer.convert(model, rank=5)
    lotformer.revert(model.bert)
    assert torch.equal(output(model, batch), before)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert not {"lotformer", "attn_implementation"} & config.keys()
    assert torch.equal(output(type(model).from_pretrained(tmp_path).eval(), batch), before)


def test_other_models_of_one_config_are_untouched(tmp_path):
    config = SMALL["bert"].build().config
    converted_one, other = transformers.BertModel(config), transformers.BertModel(config)
    lotformer.convert(converted_one, rank=5)
    converted_one.save_pretrained(tmp_path / "converted")
    other.save_pretrained(tmp_path / "other")
    assert "lotformer" not in json.loads((tmp_path / "other" / "config.json").read_text())


def test_a_model_from_the_config_of_a_converted_one():
    model, batch = SMALL["bert-classifier"].build(), SMALL["bert-classifier"].batch()
    lotformer.convert(model, rank=5, eps=0.3)
    again = type(model)(copy.deepcopy(model.config)).eval()
    again.load_state_dict(model.state_dict())
    assert lotformer.conversion.recipe(again) == lotformer.conversion.recipe(model)
    assert torch.equal(output(again, batch), output(model, batch))


def test_changes_to_the_config_reach_every_part(tmp_path):
    """The parts of a loaded model share one config, as they do in transformers."""
    model = SMALL["marian"].build()
    lotformer.convert(model, rank=5)
    again = saved_and_loaded(model, tmp_path)
    assert again.config is again.model.config
    assert again.config is again.model.decoder.config


class TestChangesToAConfig:
    """What users change in the config of a converted model is theirs, through saving, loading and reverting."""

    def test_are_saved(self, tmp_path):
        model = SMALL["bert-classifier"].build()
        lotformer.convert(model, rank=5)
        model.config.id2label = {0: "no", 1: "yes"}
        model.config.remark = "kept"
        for folder in (tmp_path / "first", tmp_path / "second"):
            again = saved_and_loaded(model, folder)
            assert (again.config.id2label, again.config.remark) == ({0: "no", 1: "yes"}, "kept")
        assert model.config is model.bert.config

    def test_are_saved_by_what_encloses_the_part(self, tmp_path):
        model = SMALL["bert-classifier"].build()
        lotformer.convert(model.bert, rank=5)
        model.bert.config.remark = "kept"
        assert saved_and_loaded(model, tmp_path).config.remark == "kept"

    def test_are_saved_in_the_part_of_a_config(self, tmp_path):
        encoder, decoder = SMALL["bert"].build().config, SMALL["bert"].build().config
        decoder.is_decoder = decoder.add_cross_attention = True
        config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
        model = transformers.EncoderDecoderModel(config)
        lotformer.convert(model, rank=5)
        model.encoder.config.remark = "kept"
        assert saved_and_loaded(model, tmp_path).config.encoder.remark == "kept"

    def test_survive_reverting_and_reach_no_other_model(self):
        config = SMALL["bert"].build().config
        model, other = transformers.BertModel(config), transformers.BertModel(config)
        lotformer.convert(model, rank=5)
        model.config.remark = "kept"
        lotformer.revert(model)
        assert model.config.remark == "kept"
        assert model.config is model.encoder.layer[0].attention.self.config
        assert not hasattr(other.config, "remark")

    def test_the_implementation_of_softmax_layers_survives_saving(self, tmp_path):
        model = SMALL["bert"].build()
        lotformer.convert(model, rank=5, layers=["encoder.layer.1.attention.self"])
        model.set_attn_implementation("eager")
        model.save_pretrained(tmp_path)
        assert model.config._attn_implementation == "eager"
        assert model.encoder.layer[0].attention.self.config._attn_implementation == "eager"


@pytest.fixture
def sentences(tmp_path) -> SentenceTransformer:
    """A tiny sentence encoder with pooling and normalisation, made from nothing."""
    words = {
        word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "sat", "down"])
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]",
    )  # fmt: skip
    SMALL["bert"].build().save_pretrained(tmp_path / "body")
    fast.save_pretrained(tmp_path / "body")
    body = Transformer(str(tmp_path / "body"))
    return SentenceTransformer(modules=[body, Pooling(24), Normalize()], device="cpu")


def test_a_sentence_transformer(sentences, tmp_path):
    texts = ["a cat sat", "a cat sat down", "down"]
    before = sentences.encode(texts)
    lotformer.convert(sentences, rank=5)
    expected = sentences.encode(texts)
    assert abs(expected - before).max() > 1e-5
    sentences.save(str(tmp_path / "saved"))
    again = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert len(converted(again)) == 2
    assert (again.encode(texts) == expected).all()
    body = transformers.AutoModel.from_pretrained(tmp_path / "saved")
    assert len(converted(body)) == 2


def test_a_sentence_transformer_learns_as_a_whole(sentences):
    """Calibration sees its attention, and fine-tuning follows the embeddings that it returns."""
    batches = [sentences.tokenize(["a cat sat", "a cat sat down", "down"])]
    kept = {name: tensor.clone() for name, tensor in batches[0].items() if isinstance(tensor, torch.Tensor)}
    original = torch.as_tensor(sentences.encode(["a cat sat down"]))
    lotformer.convert(sentences, rank=5, window=None)  # of so few tokens a window would leave nothing to learn
    report = lotformer.calibrate(sentences, batches, steps=10)
    assert report.mean_error_after < report.mean_error_before
    calibrated = torch.as_tensor(sentences.encode(["a cat sat down"]))
    tuned = lotformer.finetune(sentences, batches, steps=5, lr=1e-3)
    assert tuned.losses[-1] < tuned.losses[0]
    after = torch.as_tensor(sentences.encode(["a cat sat down"]))
    assert (after @ original.T).item() > (calibrated @ original.T).item()
    assert all(torch.equal(batches[0][name], tensor) for name, tensor in kept.items())
