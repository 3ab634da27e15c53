"""Texts longer than a model has learned positions for: the table is interpolated, saved, and given back."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import nn
from transformers import BertConfig, DistilBertConfig, ElectraConfig, RobertaConfig

import lotformer
from support.small_models import SMALL, output

pytestmark = pytest.mark.small_windows

_SIZES = {"num_attention_heads": 3, "vocab_size": 60, "max_position_embeddings": 40}
_BERT = {**_SIZES, "hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 20}
CONFIGS = {
    "bert": (BertConfig, _BERT),
    "electra": (ElectraConfig, {**_BERT, "embedding_size": 12}),
    "roberta": (RobertaConfig, {**_BERT, "pad_token_id": 1}),
    "distilbert": (DistilBertConfig, {**_SIZES, "dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 20}),
}
TRAINED = {"bert": 40, "electra": 40, "roberta": 38, "distilbert": 40}
LONG = 100

hosts = pytest.mark.parametrize("kind", CONFIGS)


def build(kind: str) -> transformers.PreTrainedModel:
    config, options = CONFIGS[kind]
    return transformers.AutoModel.from_config(config(**options)).eval()


def texts(length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 60, (2, length))
    mask = torch.ones_like(ids)
    mask[1, length // 2 :] = 0
    return {"input_ids": ids.where(mask.bool(), 1), "attention_mask": mask}


def real(out: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return out[batch["attention_mask"].bool()]


def stretched_by_hand(kind: str) -> transformers.PreTrainedModel:
    """The softmax model in a class that was built long, with an interpolated table in it."""
    config, options = CONFIGS[kind]
    offset = 40 - TRAINED[kind]
    model = build(kind)
    long = transformers.AutoModel.from_config(config(**{**options, "max_position_embeddings": LONG + offset})).eval()
    state = model.state_dict()
    (name,) = [name for name in state if name.endswith("position_embeddings.weight")]
    table = state[name]
    steps = torch.linspace(0, TRAINED[kind] - 1, LONG, dtype=torch.float64)
    low = steps.floor().long().clamp_max(TRAINED[kind] - 2)
    share = (steps - low)[:, None]
    body = table[offset:].double()
    state[name] = torch.cat([table[:offset], ((1 - share) * body[low] + share * body[low + 1]).float()])
    long.load_state_dict(state)
    return long


@hosts
def test_what_converts_is_the_softmax_model_with_the_stretched_table(kind):
    """With a window that holds the text, a converted model is its softmax self."""
    torch.manual_seed(3)
    long = stretched_by_hand(kind)
    torch.manual_seed(3)
    model = build(kind)
    lotformer.convert(model, rank=4, window_size=2 * LONG + 1, max_positions=LONG)
    batch = texts(LONG)
    torch.testing.assert_close(
        real(output(model, batch), batch), real(output(long, batch), batch), atol=2e-5, rtol=1e-4
    )
    lotformer.revert(model)
    model = build(kind)
    lotformer.convert(model, rank=4)
    with pytest.raises((IndexError, RuntimeError)):
        output(model, batch)


@hosts
def test_it_is_saved_loaded_and_reverted_bit_for_bit(kind, tmp_path):
    model = build(kind)
    before, config = copy.deepcopy(model.state_dict()), model.config
    report = lotformer.convert(model, rank=4, max_positions=LONG)
    assert (report.positions.trained, report.positions.tokens) == (TRAINED[kind], LONG)
    assert f"reads up to 100 tokens: the {TRAINED[kind]} positions it has learned are interpolated" in str(report)
    assert config.max_position_embeddings == 40, "others may share the config"
    assert model.config.max_position_embeddings == LONG + 40 - TRAINED[kind]
    batch = texts(LONG)
    expected = output(model, batch)

    model.save_pretrained(tmp_path)
    again = transformers.AutoModel.from_pretrained(tmp_path)
    assert again.config.max_position_embeddings == model.config.max_position_embeddings
    assert lotformer.conversion.recipe(again) == lotformer.conversion.recipe(model)
    assert torch.equal(output(again, batch), expected)

    for converted in (model, again):
        lotformer.revert(converted)
        assert converted.config.max_position_embeddings == 40
        after = converted.state_dict()
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in before)
        short = texts(30)
        plain = build(kind)
        plain.load_state_dict(before)
        assert torch.equal(output(converted, short), output(plain, short))
    again.save_pretrained(tmp_path / "plain")
    assert transformers.AutoModel.from_pretrained(tmp_path / "plain").config.max_position_embeddings == 40


def test_the_table_stays_long_while_a_layer_is_converted():
    model = build("bert")
    lotformer.convert(model, rank=4, max_positions=LONG)
    lotformer.revert(model, layers=["encoder.layer.0.attention.self"])
    assert output(model, texts(LONG)).shape[1] == LONG
    lotformer.revert(model)
    assert model.embeddings.position_embeddings.num_embeddings == 40


def test_a_model_with_a_head_of_which_the_body_is_converted(tmp_path):
    model = SMALL["bert-classifier"].build().eval()
    lotformer.convert(model.bert, rank=4, max_positions=LONG)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    batch = texts(LONG)
    assert torch.equal(again(**batch).logits, model(**batch).logits)


def test_a_conversion_that_fails_leaves_the_positions():
    model = build("bert")
    with pytest.raises((IndexError, RuntimeError)):
        lotformer.convert(model, rank=4, max_positions=LONG, probe=texts(LONG + 1))
    assert model.embeddings.position_embeddings.num_embeddings == 40
    assert model.config.max_position_embeddings == 40
    report = lotformer.convert(model, rank=4, layers="auto", budget=1, probe=texts(39), max_positions=LONG)
    assert report.positions.trained == 40
    assert output(model, texts(LONG)).shape[1] == LONG


@pytest.mark.parametrize(
    ("build_model", "tokens", "message"),
    [
        (SMALL["vit"].build, 100, "no table of positions"),
        (SMALL["timm-vit"].build, 100, "no table of positions"),
        (
            lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 3, batch_first=True), 1),
            100,
            "no table of positions",
        ),
        (lambda: build("bert"), 40, "has positions for 40 tokens already"),
        (lambda: build("roberta"), 38, "has positions for 38 tokens already"),
        (lambda: build("bert"), "100", "must be a number of tokens, got '100'"),
    ],
    ids=["vit", "timm", "torch", "long enough", "long enough after padding", "a text"],
)
def test_what_cannot_be_stretched_is_refused(build_model, tokens, message):
    model = build_model()
    before = model.state_dict().keys()
    with pytest.raises(ValueError, match=message):
        lotformer.convert(model, rank=4, max_positions=tokens)
    assert model.state_dict().keys() == before


def test_rotary_positions_have_no_table():
    config = transformers.ModernBertConfig(
        vocab_size=60, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    with pytest.raises(ValueError, match="rotary and relative positions have no table to run out of"):
        lotformer.convert(transformers.ModernBertModel(config), rank=4, max_positions=100)


def test_the_report_says_how_long_texts_may_be():
    assert "reads up to 38 tokens" in str(lotformer.convert(build("roberta"), rank=4))
    assert "reads up to" not in str(lotformer.convert(SMALL["vit"].build(), rank=4))


def test_a_recipe_with_other_positions_than_the_model_is_refused():
    for wrong in ({"trained": 40}, {"trained": 40, "tokens": 40}, {"trained": True, "tokens": 9}, [40, 100]):
        model = build("bert")
        lotformer.convert(model, rank=4)
        written = {**lotformer.conversion.recipe(model).to_dict(), "positions": wrong}
        with pytest.raises(ValueError, match="positions of a lotformer recipe"):
            lotformer.conversion.recipe(model).from_dict(written)
