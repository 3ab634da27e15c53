"""A tiny BERT that knows a few words, saved with its tokenizer as a checkpoint of Hugging Face."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers


def save_word_encoder(folder: Path, words: Sequence[str], **options: Any) -> Path:
    """One layer with three heads; `options` are of its config."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=3,
        intermediate_size=20,
        vocab_size=len(words),
        **options,
    )
    transformers.BertModel(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder
