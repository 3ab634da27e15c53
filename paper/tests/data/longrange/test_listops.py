"""ListOps: answers agree with an independent evaluator, shapes with the published parameters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lotformer_paper.data.longrange import listops
from lotformer_paper.data.longrange.listops import ListOps, ListOpsFiles, decode, encode
from support.listops import depth, evaluate


@pytest.fixture(scope="module")
def shard():
    return ListOps(seed=3, sizes={"train": 1000}).make("train", 0)


def test_answers_agree_with_the_independent_evaluator(shard):
    assert [evaluate(decode(tokens)) for tokens in shard.documents] == shard.labels.tolist()


def test_answers_of_short_expressions_agree_too():
    documents, answers = listops.grow(np.random.default_rng(0), 5000, shortest=0, longest=60, depth=5, args=4)
    assert len(documents) > 4000
    assert [evaluate(decode(tokens)) for tokens in documents] == answers


def test_lengths_depths_and_arguments_are_the_published_ones(shard):
    lengths = [len(tokens) for tokens in shard.documents]
    assert min(lengths) > 500
    assert max(lengths) < 2000
    assert max(depth(decode(tokens)) for tokens in shard.documents) == 10
    assert sorted(set(_argument_counts(decode(shard.documents[0])))) == list(range(2, 11))


def test_operators_and_digits_are_drawn_evenly():
    documents, _ = listops.grow(np.random.default_rng(1), 20_000, shortest=0, longest=10**6, depth=10, args=10)
    tokens = np.concatenate(documents)
    operators = np.bincount(tokens, minlength=len(listops.SYMBOLS))[1:5]
    digits = np.bincount(tokens, minlength=len(listops.SYMBOLS))[6:]
    for counts in (operators, digits):
        np.testing.assert_allclose(counts / counts.mean(), 1, atol=0.02)


def test_ids_are_fixed():
    assert encode("[MIN [MAX [MED [SM ] 0 9").tolist() == [1, 2, 3, 4, 5, 6, 15]


def test_the_published_tokens_have_no_brackets():
    kept, dropped = (ListOps(brackets=brackets, sizes={"test": 5}).make("test", 0) for brackets in (True, False))
    assert kept.labels.tolist() == dropped.labels.tolist()
    for with_brackets, without in zip(kept.documents, dropped.documents, strict=True):
        assert decode(without) == decode(with_brackets).replace(" ]", "")


def test_shards_depend_on_seed_split_and_number_only(shard):
    again = ListOps(seed=3, sizes={"train": 1000}).make("train", 0)
    assert all(np.array_equal(a, b) for a, b in zip(shard.documents, again.documents, strict=True))
    sizes = {"train": 1100, "test": 10}
    others = [
        ListOps(seed=4, sizes=sizes).make("train", 0),
        ListOps(seed=3, sizes=sizes).make("train", 1),
        ListOps(seed=3, sizes=sizes).make("test", 0),
    ]
    assert all(not np.array_equal(other.documents[0], shard.documents[0]) for other in others)
    assert len(others[1].labels) == 100


def test_released_files_are_read(tmp_path: Path):
    rows = "Source\tTarget\n( ( ( [MAX 2 ) 9 ) ] )\t9\n5\t5\n"
    for name in ("train", "val", "test"):
        (tmp_path / f"basic_{name}.tsv").write_text(rows)
    shard = ListOpsFiles(tmp_path).make("dev", 0)
    assert [decode(tokens) for tokens in shard.documents] == ["[MAX 2 9 ]", "5"]
    assert shard.labels.tolist() == [9, 5]


def test_original_files_have_the_answer_first(tmp_path: Path):
    (tmp_path / "test.tsv").write_text("0\t( ( ( ( [SM 6 ) 4 ) 0 ) ] )\n")
    [(tokens, answer)] = listops.read_tsv(tmp_path / "test.tsv")
    assert (decode(tokens), answer) == ("[SM 6 4 0 ]", 0)


@pytest.mark.parametrize("row", ["[MAX 2 9 ]", "[MAX 2 9 ]\tnine", "[MAX 2 ? ]\t9", "[MAX 2 9\t9", "\t9"])
def test_damaged_rows_are_named(tmp_path: Path, row: str):
    path = tmp_path / "basic_test.tsv"
    path.write_text(f"Source\tTarget\n[MIN 1 2 ]\t1\n{row}\n")
    with pytest.raises(ValueError, match=r"basic_test\.tsv, line 3"):
        list(listops.read_tsv(path))


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"basic_val\.tsv"):
        ListOpsFiles(tmp_path).make("dev", 0)


def _argument_counts(expression: str) -> list[int]:
    counts: list[int] = []
    open_lists: list[int] = []
    for symbol in expression.split():
        if symbol == "]":
            counts.append(open_lists.pop())
            continue
        if open_lists:
            open_lists[-1] += 1
        if symbol.startswith("["):
            open_lists.append(0)
    return counts
