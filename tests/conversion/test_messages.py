"""What a conversion says, and how a plain checkpoint is converted while it is loaded."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

import lotformer
from support.small_models import SMALL, output


class TestReports:
    def test_cross_attention_is_skipped_because_it_is(self):
        report = lotformer.convert(SMALL["marian"].build(), rank=4)
        reasons = {layer.name.rpartition(".")[2]: layer.reason for layer in report.skipped}
        assert reasons["encoder_attn"] == "it is cross-attention"
        assert reasons["self_attn"].startswith("it is causal")

    def test_one_layer_is_no_layers_and_has_a_name(self):
        said = str(lotformer.convert(nn.MultiheadAttention(24, 3, batch_first=True), rank=4))
        assert "1 attention layer now" in said
        assert "converted  the module itself (MultiheadAttention)" in said


class TestConvertingWhileLoading:
    @pytest.fixture
    def plain(self, tmp_path):
        SMALL["bert-classifier"].build().save_pretrained(tmp_path / "plain")
        return tmp_path / "plain"

    @pytest.fixture
    def said(self, monkeypatch):
        """What transformers says of a load, as a user hears it."""
        transformers.logging.set_verbosity_warning()
        records: list[str] = []
        logger = transformers.logging.get_logger("transformers.modeling_utils")
        monkeypatch.setattr(logger, "handle", lambda record: records.append(record.getMessage()))
        monkeypatch.setattr(
            transformers.logging.get_logger("transformers.utils.loading_report"),
            "handle",
            lambda record: records.append(record.getMessage()),
        )
        yield records
        transformers.logging.set_verbosity_error()

    def test_what_is_new_by_design_is_not_reported_missing(self, plain, said):
        kind = transformers.BertForSequenceClassification
        model = kind.from_pretrained(plain, attn_implementation="lot")
        assert not said
        converted = kind.from_pretrained(plain)
        lotformer.convert(converted)
        assert model.state_dict().keys() == converted.state_dict().keys()
        assert all(p.isfinite().all() for p in model.parameters())

    def test_what_else_is_missing_still_is(self, plain, said):
        kind = transformers.BertForTokenClassification
        state = {k: v for k, v in kind.from_pretrained(plain).state_dict().items() if "intermediate" not in k}
        kind.from_pretrained(plain).save_pretrained(plain, state_dict=state)
        said.clear()
        kind.from_pretrained(plain, attn_implementation="lot")
        assert "intermediate" in "".join(said)
        assert "mechanism" not in "".join(said)

    @pytest.mark.parametrize("loader", ["AutoModel", "BertModel", "AutoModelForSequenceClassification"])
    def test_options_are_those_of_convert(self, plain, tmp_path, loader):
        kind = getattr(transformers, loader)
        model = kind.from_pretrained(plain, attn_implementation="lot", lot_options={"rank": 7, "window": None})
        expected = kind.from_pretrained(plain)
        lotformer.convert(expected, rank=7, window=None)
        assert lotformer.conversion.recipe(model) == lotformer.conversion.recipe(expected)
        model.save_pretrained(tmp_path / "converted")
        assert "lot_options" not in (tmp_path / "converted" / "config.json").read_text()
        batch = SMALL["bert-classifier"].batch()
        assert torch.equal(output(kind.from_pretrained(tmp_path / "converted"), batch), output(model, batch))

    @pytest.mark.parametrize(
        ("asked", "kind", "message"),
        [
            ({"attn_implementation": "lot", "lot_options": {"rnak": 7}}, ValueError, "rnak. Did you mean 'rank'"),
            ({"attn_implementation": "lot", "lot_option": {"rank": 7}}, TypeError, "lot_option"),
            ({"attn_implementation": "lot", "lot_options": 64}, ValueError, "must be a table of options.*got 64"),
            ({"attn_implementation": "lot", "lot_options": {"rank": "7"}}, ValueError, "rank must be an integer"),
            ({"lot_options": {"rank": 7}}, ValueError, "expected attn_implementation='lot'"),
        ],
        ids=["misspelled option", "misspelled argument", "a number", "another type", "without the request"],
    )
    def test_what_is_not_understood_is_refused(self, plain, asked, kind, message):
        with pytest.raises(kind, match=message):
            transformers.AutoModel.from_pretrained(plain, **asked)

    def test_a_converted_checkpoint_has_its_own(self, tmp_path):
        model = SMALL["bert"].build()
        lotformer.convert(model, rank=5)
        model.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="converted already: load it without"):
            transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="lot", lot_options={"rank": 5})
