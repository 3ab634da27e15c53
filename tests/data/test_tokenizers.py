"""A tokenizer that cannot be read for want of a package says which."""

from __future__ import annotations

import importlib.util

import pytest

from lotformer.data.text import load_tokenizer


def test_sentencepiece_is_named_where_it_is_missing(tmp_path, monkeypatch):
    (tmp_path / "source.spm").write_bytes(b"")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sentencepiece" else find(name))
    with pytest.raises(ImportError, match=r"needs SentencePiece: pip install 'lotformer\[text\]'"):
        load_tokenizer(tmp_path)
