"""Retrieval: AAN's files, and film pairs whose answer no shortcut gives away."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from lotformer_paper.data.longrange.prepare import prepare
from lotformer_paper.data.longrange.retrieval import FilmPairs, PaperPairs, same_or_other
from lotformer_paper.data.longrange.text import ReviewFiles


def films(folder: Path, per_class: int = 60) -> FilmPairs:
    for split in ("train", "test"):
        for label in ("pos", "neg"):
            place = folder / "aclImdb" / split / label
            place.mkdir(parents=True)
            lines = []
            for number in range(per_class):
                film = f"http://example.org/{split}{number % 15}"
                (place / f"{number}_5.txt").write_text(f"{film} {label} {number}")
                lines.append(film)
            (folder / "aclImdb" / split / f"urls_{label}.txt").write_text("\n".join(lines) + "\n")
    return FilmPairs(ReviewFiles(folder / "aclImdb"), folder / "aclImdb")


def read(prepared, split):
    part = prepared[split]
    return [
        (*(bytes(document).decode().split() for document in example.documents), example.label)
        for example in part.__getitems__(range(len(part)))
    ]


def test_labels_say_whether_two_reviews_are_of_one_film(tmp_path):
    prepared = prepare(films(tmp_path), tmp_path, workers=1)
    for split in ("train", "dev", "test"):
        pairs = read(prepared, split)
        assert len(pairs) > 20
        for first, second, label in pairs:
            assert first != second
            assert (first[0] == second[0]) == label
        assert np.mean([label for *_, label in pairs]) == 0.5


def test_films_of_different_splits_are_different(tmp_path):
    prepared = prepare(films(tmp_path), tmp_path, workers=1)
    seen = [{first[0] for first, _, _ in read(prepared, split)} for split in ("train", "dev", "test")]
    assert not seen[0] & seen[1]
    assert not (seen[0] | seen[1]) & seen[2]


def test_neither_a_review_nor_a_pair_of_sentiments_tells_the_label():
    rng = np.random.default_rng(0)
    of_film, sentiment = rng.integers(0, 40, 1000), rng.integers(0, 2, 1000)
    pairs, labels = same_or_other(rng, of_film, sentiment, 3)
    for side in (0, 1):
        assert Counter(pairs[labels == 1, side]) == Counter(pairs[labels == 0, side])
    joined, apart = (Counter(map(tuple, sentiment[pairs[labels == label]])) for label in (1, 0))
    assert joined == apart


def test_the_stand_in_is_named_as_another_task(tmp_path):
    assert films(tmp_path).task == "film-pairs"
    assert PaperPairs(tmp_path).task == "retrieval"


def test_missing_addresses_are_named(tmp_path):
    source = films(tmp_path)
    (tmp_path / "aclImdb" / "train" / "urls_pos.txt").write_text("http://example.org/0\n")
    with pytest.raises(ValueError, match=r"urls_pos\.txt has no address for 1_5\.txt: expected in line 2"):
        source.shards()
    (tmp_path / "aclImdb" / "train" / "urls_pos.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"urls_pos\.txt"):
        source.describe()


@pytest.mark.parametrize("sentiment", ["pos", "neg"])
def test_other_addresses_make_another_set(tmp_path, sentiment):
    source = films(tmp_path)
    before, path = source.describe(), tmp_path / "aclImdb" / "train" / f"urls_{sentiment}.txt"
    path.write_text(path.read_text().replace("train3\n", "train4\n"))
    assert source.describe() != before


def test_an_address_ends_at_its_line_feed(tmp_path):
    source = films(tmp_path)
    path = tmp_path / "aclImdb" / "train" / "urls_pos.txt"
    path.write_text("http://example.org/a\u2028b\n" + path.read_text().partition("\n")[2])
    found = {row[0].name: row[2] for row in source._reviews("train") + source._reviews("dev") if row[1] == 1}
    assert found["0_5.txt"] == "http://example.org/a\u2028b"
    assert found["1_5.txt"] == "http://example.org/train1"
    path.write_text("\n" + path.read_text().partition("\n")[2])
    with pytest.raises(ValueError, match=r"urls_pos\.txt has no address for 0_5\.txt: expected in line 1"):
        source.shards()


def aan(folder: Path, rows: str) -> PaperPairs:
    for name in ("train", "eval", "test"):
        (folder / f"new_aan_pairs.{name}.tsv").write_text(rows)
    return PaperPairs(folder)


def test_paper_pairs_are_read(tmp_path):
    source = aan(tmp_path, "1.0\tA\tB\tone paper\tanother paper\n0\tC\tD\tb'quoted'\tplain\n")
    shard = source.make("dev", 0)
    assert [bytes(document) for document in shard.documents] == [b"one paper", b"another paper", b"quoted", b"plain"]
    assert shard.examples.tolist() == [[0, 1], [2, 3]]
    assert shard.labels.tolist() == [1, 0]


def test_damaged_pairs_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"new_aan_pairs\.test\.tsv, line 2"):
        aan(tmp_path, "1\tA\tB\tx\ty\n1\tA\tB\tx\n").make("test", 0)
    with pytest.raises(FileNotFoundError, match=r"new_aan_pairs\.train\.tsv"):
        PaperPairs(tmp_path / "elsewhere").describe()
