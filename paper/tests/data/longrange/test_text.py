"""Text: IMDB's layouts as bytes."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

from lotformer_paper.data.longrange import text
from lotformer_paper.data.longrange.prepare import prepare


def imdb(folder: Path, reviews: int = 12) -> Path:
    for split in ("train", "test"):
        for label in ("pos", "neg"):
            place = folder / split / label
            place.mkdir(parents=True)
            for number in range(reviews):
                (place / f"{number}_7.txt").write_text(f"{split} {label} {number} é")
    return folder


def test_reviews_become_bytes_in_order_of_their_numbers(tmp_path):
    source = text.reviews(imdb(tmp_path / "aclImdb").parent)
    shard = source.make("train", 0)
    decoded = [bytes(document).decode() for document in shard.documents]
    assert decoded == [f"train {label} {number} é" for label in ("neg", "pos") for number in range(12)]
    assert shard.labels.tolist() == [0] * 12 + [1] * 12


def test_the_arena_validates_on_the_test_set(tmp_path):
    prepared = prepare(text.ReviewFiles(imdb(tmp_path / "aclImdb")), tmp_path, workers=1)
    assert prepared.splits == ["dev", "test", "train"]
    assert prepared["dev"].folder == prepared["test"].folder


def test_documents_are_cut_and_hold_no_padding():
    assert len(text.as_bytes(b"x" * 5000)) == 4000
    assert bytes(text.as_bytes(b"a\0b")) == b"a b"


def test_saved_data_sets_give_the_same_arrays(tmp_path):
    datasets = pytest.importorskip("datasets")
    imdb(tmp_path / "aclImdb", reviews=3)
    files = text.reviews(tmp_path)
    splits = {}
    for split in ("train", "test"):
        rows = files.files(split)
        splits[split] = datasets.Dataset.from_dict(
            {"text": [path.read_text() for path, _ in rows], "label": [label for _, label in rows]}
        )
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "imdb"))
    saved = text.reviews(tmp_path)
    assert isinstance(saved, text.ReviewDataset)
    for split in ("train", "test"):
        one, two = files.make(split, 0), saved.make(split, 0)
        assert all(np.array_equal(a, b) for a, b in zip(one.documents, two.documents, strict=True))
        assert np.array_equal(one.labels, two.labels)


def test_a_changed_file_is_another_set(tmp_path):
    source = text.ReviewFiles(imdb(tmp_path / "aclImdb"))
    before = source.describe()
    (tmp_path / "aclImdb" / "test" / "pos" / "0_7.txt").write_text("longer than it was before")
    assert source.describe() != before


def test_a_file_of_the_same_size_and_time_with_other_text_is_another_set(tmp_path):
    source = text.ReviewFiles(imdb(tmp_path / "aclImdb"))
    before, file = source.describe(), tmp_path / "aclImdb" / "test" / "pos" / "0_7.txt"
    times = file.stat()
    file.write_text(file.read_text()[::-1])
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert source.describe() != before


def test_a_saved_data_set_is_known_by_its_contents(tmp_path):
    datasets = pytest.importorskip("datasets")
    found = set()
    for label in (0, 1):
        part = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [label, 1]})
        datasets.DatasetDict({"train": part, "test": part}).save_to_disk(str(tmp_path / f"{label}" / "imdb"))
        for state in (tmp_path / f"{label}").rglob("state.json"):  # its own fingerprint may be a copy's
            state.write_text(re.sub(r'"_fingerprint": "\w+"', '"_fingerprint": "same"', state.read_text()))
        found.add(repr(text.reviews(tmp_path / f"{label}").describe()))
    assert len(found) == 2


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="aclImdb"):
        text.reviews(tmp_path)
    (tmp_path / "aclImdb").mkdir()
    with pytest.raises(FileNotFoundError, match=r"train/neg/\*\.txt"):
        text.reviews(tmp_path).shards()
