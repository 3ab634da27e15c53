"""A retriever and a translator: nothing that is scored is learned from, and every stage is scored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from lotformer_paper.experiments import engine
from lotformer_paper.experiments.survival import retrieval, translation

pytestmark = pytest.mark.small_windows

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "green", "blue", "old", "house", "tree", "river", "is"]


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def sentences(start: int, count: int = 12) -> list[str]:
    made = [f"{a} {b} is {c}" for a in WORDS[5:9] for b in WORDS[9:12] for c in WORDS[5:9]]
    return made[start : start + count]


@pytest.fixture
def encoder(tmp_path) -> Path:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20, vocab_size=len(WORDS),
        initializer_range=0.3,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    tokenizer().save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


@pytest.fixture
def translator(tmp_path) -> Path:
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=len(WORDS), d_model=24, encoder_layers=2, decoder_layers=1, encoder_attention_heads=3,
        decoder_attention_heads=3, encoder_ffn_dim=20, decoder_ffn_dim=20, max_position_embeddings=40, init_std=0.3,
        pad_token_id=0, bos_token_id=2, eos_token_id=3, decoder_start_token_id=2, forced_eos_token_id=3,
    )  # fmt: skip
    transformers.BartForConditionalGeneration(config).save_pretrained(tmp_path / "bart")
    tokenizer().save_pretrained(tmp_path / "bart")
    return tmp_path / "bart"


@pytest.fixture
def data(tmp_path) -> Path:
    stsb, scifact, raw = tmp_path / "glue" / "STS-B", tmp_path / "scifact", tmp_path / "multi30k" / "task1" / "raw"
    for folder in (stsb, scifact / "qrels", raw):
        folder.mkdir(parents=True)
    for split in ("train", "dev"):
        rows = [f"{a}\t{b}\t{i}" for i, (a, b) in enumerate(zip(sentences(0, 5), sentences(9, 5), strict=True))]
        (stsb / f"{split}.tsv").write_text("\n".join(["sentence1\tsentence2\tscore", *rows]))
    corpus = [{"_id": str(i), "title": "", "text": text} for i, text in enumerate(sentences(14))]
    (scifact / "corpus.jsonl").write_text("\n".join(map(json.dumps, corpus)))
    queries = [{"_id": f"q{i}", "text": text} for i, text in enumerate(sentences(26))]
    (scifact / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)))
    for split, numbers in (("test", range(4)), ("train", range(4, 12))):
        (scifact / "qrels" / f"{split}.tsv").write_text("\n".join(f"q{i}\t0 {i}\t1" for i in numbers))
    for split, start in (("train", 0), ("val", 20), ("test_2016_flickr", 8)):
        for language in ("fr", "en"):
            (raw / f"{split}.{language}").write_text("\n".join(sentences(start)) + "\n")
    return tmp_path


STAGES = ["converted", "calibrated", "fine-tuned"]


def test_a_retriever(encoder, data, tmp_path):
    settings = retrieval.RetrievalSettings(
        calibration_inputs=8, calibration_steps=3, finetune_steps=2, batch_size=4, documents=6, pairs=5, max_length=16
    )
    task = retrieval.RetrievalTask(encoder, data / "scifact", data, settings)
    scored = {task.set.queries[f"q{i}"] for i in range(4)} | {task.set.documents[name] for name in task.searched}
    assert len(task.learned_from(8)) == 8
    assert not scored & set(task.learned_from(8))
    inputs = {"checkpoint": encoder, "data_dir": data, "variants": "lot-32"}
    cells = engine.run(retrieval.EXPERIMENT, settings, tmp_path / "out", **inputs)
    assert [cell.stage for cell in cells] == STAGES
    assert set(cells[0].scores) == {"nDCG@10", "STS-B", "cosine"}
    assert cells[1].scores["cosine"] > cells[0].scores["cosine"]
    assert "nDCG@10" in engine.render(tmp_path / "out").markdown()


def test_texts_as_long_as_documents_are_made_where_all_of_them_are_searched(encoder, data):
    task = retrieval.RetrievalTask(encoder, data / "scifact", data, retrieval.RetrievalSettings())
    claims = {task.set.queries[f"q{i}"] for i in range(4, 12)}
    texts = task.learned_from(8)
    assert len(texts) == len(set(texts)) == 8
    short = [text for text in texts if text in claims]
    assert len(short) == 4
    assert all(len(text) > 5 * max(map(len, short)) for text in texts if text not in claims)
    assert not any(text in texts for text in task.set.documents.values())


def test_a_collection_may_be_learned_from_without_what_is_asked_for(encoder, data):
    settings = retrieval.RetrievalSettings(learned_documents="irrelevant")
    task = retrieval.RetrievalTask(encoder, data / "scifact", data, settings)
    relevant = {task.set.documents[name] for names in task.set.relevance["test"].values() for name in names}
    learned = set(task.learned_from(24)) & set(task.set.documents.values())
    assert relevant
    assert learned == set(task.set.documents.values()) - relevant


def test_a_translator(translator, data, tmp_path):
    pytest.importorskip("sacrebleu")
    settings = translation.TranslationSettings(
        calibration_inputs=6, calibration_steps=3, finetune_steps=2, batch_size=3, sentences=5, beams=1, max_length=12
    )
    task = translation.TranslationTask(translator, data, settings)
    assert not set(task.learned_from(99)) & set(sentences(8))
    inputs = {"checkpoint": translator, "data_dir": data, "variants": "lot-32, sinkformer"}
    cells = engine.run(translation.EXPERIMENT, settings, tmp_path / "out", **inputs)
    assert [cell.stage for cell in cells] == ["converted", "calibrated", "fine-tuned", "converted", "fine-tuned"]
    assert cells[1].scores["cosine"] > cells[0].scores["cosine"]
    assert "sinkformer, fine-tuned" in engine.render(tmp_path / "out").markdown()
