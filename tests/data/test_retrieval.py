"""Retrieval sets in BEIR's layout, and nDCG by its definition."""

from __future__ import annotations

import json
import math

import pytest
import torch

from lotformer.data import retrieval


def write(folder, documents: int = 6):
    (folder / "qrels").mkdir()
    rows = [{"_id": f"d{i}", "title": "T", "text": f"text {i}"} for i in range(documents)]
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "queries.jsonl").write_text("\n".join(json.dumps({"_id": f"q{i}", "text": f"ask {i}"}) for i in range(3)))
    (folder / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\nq0\td0\t1\n")
    (folder / "qrels" / "test.tsv").write_text("q1\t0 d5\t1\nq2\t0 d1\t1\n")
    return folder


def test_both_forms_of_qrels_are_read(tmp_path):
    found = retrieval.load(write(tmp_path))
    assert found.relevance == {"train": {"q0": {"d0": 1.0}}, "test": {"q1": {"d5": 1.0}, "q2": {"d1": 1.0}}}
    assert found.documents["d3"] == "T text 3"


def test_relevant_documents_are_always_searched(tmp_path):
    found = retrieval.load(write(tmp_path))
    assert found.searched(1) == ["d1", "d5"]
    assert found.searched(4) == ["d0", "d1", "d3", "d5"]
    assert len(found.searched(99)) == 6


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"corpus\.jsonl is missing"):
        retrieval.load(tmp_path)


def test_ndcg():
    relevance = torch.tensor([[1.0, 0, 0], [0, 1, 1], [0, 0, 0]])
    similarities = torch.tensor([[0.1, 0.9, 0.5], [0.9, 0.8, 0.1], [1, 2, 3]])
    second = (1 / math.log2(3) + 1 / math.log2(4)) / (1 + 1 / math.log2(3))
    assert retrieval.ndcg(similarities, relevance) == pytest.approx((1 / math.log2(4) + second) / 2)
    assert retrieval.ndcg(relevance, relevance, depth=1) == pytest.approx(1.0)
