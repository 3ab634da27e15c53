"""Prepared pairs: cleaned, made once, complete or absent, with a vocabulary that has seen no test sentence."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lotformer_paper.data.translation.batches import Collate, Encoded, EncodedPairs, by_tokens, labels_of
from lotformer_paper.data.translation.cleaning import Cleaning
from lotformer_paper.data.translation.sets import Recipe, open_set, prepare

RECIPE = Recipe(("files",), "xx", "yy", Cleaning(longest=5), 60, (Path("a"), Path("b"), Path("c")))


@pytest.fixture
def folder(tmp_path):
    texts = {
        "a": (
            "Ein Hund.\n\nzu viele Wörter sind in diesem Satz\nein  Haus \neins zwei drei\n",
            "A dog.\nx\ny\na house\nq\n",
        ),
        "b": ("Ein QX\n", "one\n"),
        "c": ("Zwei viel zu lange Sätze für das Training\n", "two\n"),
    }
    for prefix, sides in texts.items():
        for language, text in zip(("xx", "yy"), sides, strict=True):
            (tmp_path / f"{prefix}.{language}").write_text(text)
    return tmp_path


def test_training_pairs_are_cleaned_and_scored_ones_only_normalised(folder):
    made = prepare(RECIPE, folder)
    assert made["train"] == [("ein hund.", "a dog."), ("ein haus", "a house")]
    assert made["test"] == [("zwei viel zu lange sätze für das training", "two")]


def test_the_vocabulary_knows_training_text_alone_and_gives_it_back(folder):
    tokenizer = prepare(RECIPE, folder).tokenizer
    for text in ("ein hund.", "a dog. a house"):
        ids = tokenizer(text)["input_ids"]
        assert ids[-1] == tokenizer.eos_token_id == 2
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    known = "".join(tokenizer.get_vocab()).replace("<s>", "").replace("<unk>", "")
    assert "q" not in known  # of the validation set
    assert "w" not in known  # of the test set
    assert tokenizer.unk_token_id in tokenizer("qx")["input_ids"]


def test_a_set_is_made_once_and_other_texts_make_another(folder):
    first = prepare(RECIPE, folder)
    stamp = (first.folder / "manifest.json").stat().st_mtime_ns
    again = prepare(RECIPE, folder)
    assert (again.folder, again.fingerprint) == (first.folder, first.fingerprint)
    assert (again.folder / "manifest.json").stat().st_mtime_ns == stamp
    (folder / "a.xx").write_text("Ein Hund.\nx\nx\nein Haus\nx y z\n")
    assert prepare(RECIPE, folder).folder != first.folder
    assert sorted(path.name[0] for path in (folder / "translation").iterdir()) == ["f", "f"]  # and nothing half-made


def test_damage_is_named(folder):
    made = prepare(RECIPE, folder)
    (made.folder / "valid.source").write_text("other\n")
    with pytest.raises(ValueError, match=r"valid\.source is missing or damaged"):
        open_set(made.folder)
    with pytest.raises(FileNotFoundError, match="not a prepared set"):
        open_set(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"corpora": ("multi",)}, "unknown corpus 'multi'"),
        ({"prefixes": ()}, "three prefixes"),
        ({"target": "xx"}, "two languages"),
    ],
    ids=["corpus", "prefixes", "languages"],
)
def test_what_cannot_be_prepared_is_refused(change, said):

    with pytest.raises(ValueError, match=said):
        dataclasses.replace(RECIPE, **change)


def test_moses_limits():
    cleaning = Cleaning(lowercase=False, longest=4, ratio=1.5)
    pairs = [("a b", "a b c"), ("a b", "a b c d"), ("", "a"), ("a,b", "A b. "), ("a b c d e", "a b c d")]
    assert cleaning.kept(pairs) == [("a b", "a b c"), ("a,b", "A b.")]


@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=60),
    seed=st.integers(0, 3),
    most=st.integers(1, 9),
)
def test_batches_hold_every_pair_once_and_keep_to_the_limits(lengths, seed, most):
    lengths = np.array(lengths)
    batches = by_tokens(lengths, 64, seed, 1, most)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(len(batch) * lengths[batch].max() <= 64 and len(batch) <= most for batch in batches)
    assert batches == by_tokens(lengths, 64, seed, 1, most)


def test_batches_differ_between_epochs_and_a_pair_too_long_is_named():
    lengths = np.stack([np.arange(1, 41), np.arange(1, 41)], 1)
    assert by_tokens(lengths, 64, 0, 0) != by_tokens(lengths, 64, 0, 1)
    with pytest.raises(ValueError, match="pair 40 has 40 tokens and a batch at most 39"):
        by_tokens(lengths, 39, 0, 0)


def test_the_decoder_is_shown_what_came_before_what_it_should_say():
    items = [Encoded(np.array([5, 6, 2]), np.array([7, 8, 9, 2])), Encoded(np.array([5, 2]), np.array([7, 2]))]
    batch = Collate(pad=1, start=3)(items)
    assert batch["input_ids"].tolist() == [[5, 6, 2], [5, 2, 1]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["decoder_input_ids"].tolist() == [[3, 7, 8, 9], [3, 7, 1, 1]]
    assert labels_of(batch["decoder_input_ids"], pad=1, eos=2).tolist() == [[7, 8, 9, 2], [7, 2, 1, 1]]
    started_by_pad = torch.tensor([[1, 7, 8], [1, 7, 1]])  # as OPUS-MT does
    assert labels_of(started_by_pad, pad=1, eos=2).tolist() == [[7, 8, 2], [7, 2, 1]]


def test_long_texts_are_cut_and_still_end(folder):
    pairs = EncodedPairs([("ein hund. " * 9, "a dog.")], prepare(RECIPE, folder).tokenizer, longest=4)
    assert len(pairs[0].source) == 4
    assert pairs[0].source[-1] == 2
