"""Retrieval sets in BEIR's layout, and nDCG by its definition."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch

from lotformer_paper.data import retrieval


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


def test_ids_and_texts_are_what_the_file_says(tmp_path):
    write(tmp_path)
    rows = [{"_id": "a 1", "text": "one\u2028two"}, {"_id": "b", "title": None, "text": "three\x85four"}]
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "corpus.jsonl").write_text(lines + "\n", encoding="utf-8")
    header = "query-id\tcorpus-id\tscore\n"
    (tmp_path / "qrels" / "train.tsv").write_text(f"{header}q0\ta 1\t1e0\nq0\tb\t-1\n")
    (tmp_path / "qrels" / "test.tsv").write_text("q1 Q0 b 2\nq2 0 \ta 1\t1\nq2\t 0 b\t0\n")
    found = retrieval.load(tmp_path)
    assert found.documents == {"a 1": "one\u2028two", "b": "three\x85four"}
    assert found.relevance["train"] == {"q0": {"a 1": 1.0, "b": -1.0}}
    assert found.relevance["test"] == {"q1": {"b": 2.0}, "q2": {"a 1": 1.0, "b": 0.0}}


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("corpus.jsonl", '{"_id": "d1", "text": null}', "1: expected \"text\" to be a text, got 'None'"),
        ("corpus.jsonl", '{"_id": 1, "text": ""}', "1: expected \"_id\" to be a text, got '1'"),
        ("corpus.jsonl", '{"text": "a"}', '1: expected "_id" to be a text, got nothing'),
        ("corpus.jsonl", '{"_id": "a", "text": ""}\n{"_id": "a", "text": ""}', "2: the id 'a' is taken by line 1"),
        ("queries.jsonl", '{"_id": "q0", "text": "a"}\n[1]', "2: expected a JSON object, got '[1]'"),
        ("queries.jsonl", '{"_id": "q0", "te', "1 is not a JSON object, or is damaged: Unterminated string"),
        ("qrels/test.tsv", "q1\td1\t1\nq1\td2\n", "2: expected query, document and grade between tabs"),
        ("qrels/test.tsv", "q1\td1\tnan\n", "1: expected query, document and grade between tabs, got 'q1\\td1\\tnan'"),
        ("qrels/test.tsv", "q1\td1\t1\nq1\td1\t0\n", "2: the document 'd1' is judged twice for the query 'q1'"),
        ("qrels/test.tsv", "q1\td77\t1\n", "1: there is no document with the id 'd77'"),
        ("qrels/test.tsv", "q77\td1\t1\n", "1: there is no query with the id 'q77'"),
    ],
)
def test_a_bad_row_is_named(tmp_path, file, content, said):
    (write(tmp_path) / file).write_text(content)
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / file}, line {said}")):
        retrieval.load(tmp_path)


def test_a_set_without_judgements_is_refused(tmp_path):
    (write(tmp_path) / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n")
    with pytest.raises(ValueError, match=r"test\.tsv: expected judgements, found none"):
        retrieval.load(tmp_path)


def test_grades_below_zero_gain_nothing():
    similarities = torch.tensor([[3.0, 2.0, 1.0]])
    assert retrieval.ndcg(similarities, torch.tensor([[-1.0, 1, 0]])) == pytest.approx(1 / math.log2(3))
