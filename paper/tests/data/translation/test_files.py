"""Aligned files: what is wrong with them is said once, with the line."""

from __future__ import annotations

import gzip
import re
import zipfile

import pytest

from lotformer_paper.data.translation import corpora
from lotformer_paper.data.translation.corpora import iwslt14, multi30k, part_of, read_corpus, tatoeba
from lotformer_paper.data.translation.lines import read_lines, read_pairs


def test_lines_end_at_line_feeds_only(tmp_path):
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress("\ufeffeins\r\nzwei\u2028drei\x0bvier\nfünf".encode()))
    assert read_lines(path) == ["eins", "zwei\u2028drei\x0bvier", "fünf"]


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (b"a\nb\nc\n", b"a\nb\n", "line 3 of ours.de"),
        (b"a\n", b"a\nb\n", "line 2 of theirs.en"),
        (b"", b"a\n", "ours.de is empty: expected text in its line 1"),
        (b"a\nb \xff c\n", b"a\nb\n", "ours.de, line 2: not UTF-8 (byte 0xff at position 3)"),
    ],
    ids=["longer source", "longer target", "empty", "not UTF-8"],
)
def test_bad_files_are_named_with_their_line(tmp_path, ours, theirs, said):
    (tmp_path / "ours.de").write_bytes(ours)
    (tmp_path / "theirs.en").write_bytes(theirs)
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        read_pairs(tmp_path / "ours.de", tmp_path / "theirs.en")
    assert "\n" not in str(caught.value)


def test_an_empty_line_is_refused_only_where_it_would_be_scored(tmp_path):
    for split, texts in {"train": "a\n\n", "valid": "a\n", "test": "a\n\n"}.items():
        (tmp_path / f"{split}.de").write_text(texts)
        (tmp_path / f"{split}.en").write_text("a\nb\n" if split != "valid" else "a\n")
    reader = corpora.files(*(tmp_path / split for split in ("train", "valid", "test")))
    with pytest.raises(ValueError, match="test, de side, line 2: empty"):
        read_corpus([reader], tmp_path, "de", "en")
    (tmp_path / "test.de").write_text("a\nb\n")
    assert len(read_corpus([reader], tmp_path, "de", "en").train) == 2


def test_multi30k_may_keep_its_languages_in_different_folders(tmp_path):
    for language, folder in {"de": "multi30k", "fr": "more"}.items():
        place = tmp_path / folder / "task1" / "raw"
        place.mkdir(parents=True)
        for split in ("train", "val", "test_2016_flickr"):
            (place / f"{split}.{language}.gz").write_bytes(gzip.compress(f"{split} {language}\n".encode()))
    corpus = multi30k(tmp_path, "de", "fr")
    assert corpus.train == [("train de", "train fr")]
    assert corpus.test == [("test_2016_flickr de", "test_2016_flickr fr")]
    with pytest.raises(FileNotFoundError, match=r"no train\.en of Multi30k"):
        multi30k(tmp_path, "de", "en")


def test_iwslt_is_read_in_fairseqs_layout_and_its_joints_are_undone(tmp_path):
    place = tmp_path / "iwslt14.tokenized.de-en"
    (place / "tmp").mkdir(parents=True)
    for language in ("de", "en"):
        (place / f"train.{language}").write_text("pyrami@@ de .\nend@@\n")
        for split in ("valid", "test"):
            (place / "tmp" / f"{split}.{language}").write_text(f"{split} .\n")
    corpus = iwslt14(tmp_path, "de", "en")
    assert corpus.train == [("pyramide .", "pyramide ."), ("end", "end")]
    assert corpus.valid == [("valid .", "valid .")]


def test_no_english_sentence_of_tatoeba_is_in_two_parts(tmp_path):
    sentences = [f"This is number {i}{end}" for i in range(400) for end in ("", ".", "!")]
    lines = [f"{text}\tDas ist {text} {word}." for text in (*sentences, *map(str.upper, sentences)) for word in "ab"]
    with zipfile.ZipFile(tmp_path / "deu-eng.zip", "w") as archive:
        archive.writestr("deu.txt", "\n".join(lines))
    corpus = tatoeba(tmp_path, "de", "en")
    parts = [{_bare(english) for _, english in part} for part in (corpus.train, corpus.valid, corpus.test)]
    assert all(parts)
    assert sum(map(len, parts)) == len(set().union(*parts)) == 400
    assert sum(map(len, (corpus.train, corpus.valid, corpus.test))) == len(lines)
    assert part_of("Tom!") == part_of(" tom")


def _bare(english: str) -> str:
    return english.lower().strip(".!")


def test_a_line_of_tatoeba_without_a_translation_is_named(tmp_path):
    (tmp_path / "deu.txt").write_text("Hi.\tHallo!\nRun!\n")
    with pytest.raises(ValueError, match=r"deu\.txt, line 2: expected English, a tab and a translation, got 'Run!'"):
        tatoeba(tmp_path, "de", "en")


def test_a_mix_is_scored_on_its_first_corpus_and_trains_on_nothing_of_that(tmp_path):
    def of(train, scored):
        return lambda *_: corpora.Corpus(train, scored, scored)

    mixed = read_corpus(
        [of([("eins", "one")], [("zwei", "Two.")]), of([("zwo", "two"), ("drei", "three")], [("vier", "four")])],
        tmp_path,
        "de",
        "en",
    )
    assert mixed.train == [("eins", "one"), ("drei", "three")]
    assert mixed.test == [("zwei", "Two.")]
