"""A language to learn in seconds: words are renamed and their order reversed."""

from __future__ import annotations

import random
from pathlib import Path

from lotformer_paper.data.translation.sets import TranslationSet, prepare
from lotformer_paper.experiments.translation.settings import TranslationSettings, recipe_of

OURS = ("ba", "de", "gi", "ko", "lu", "ma")
THEIRS = ("xin", "yor", "zap", "wek", "vud", "tol")


def write(folder: Path, train: int = 1500, scored: int = 100) -> None:
    """Aligned files of sentences of two to five words; no scored sentence is in the training set."""
    rng, seen = random.Random(0), set[tuple[int, ...]]()
    for split, count in {"train": train, "valid": scored, "test": scored}.items():
        sentences: list[tuple[int, ...]] = []
        while len(sentences) < count:
            words = tuple(rng.choices(range(len(OURS)), k=rng.randint(2, 5)))
            if split == "train" or words not in seen:
                sentences.append(words)
                seen.add(words)
        ours = [" ".join(OURS[word] for word in words) for words in sentences]
        theirs = [" ".join(THEIRS[word] for word in reversed(words)) for words in sentences]
        (folder / f"{split}.xx").write_text("\n".join(ours) + "\n")
        (folder / f"{split}.yy").write_text("\n".join(theirs) + "\n")


def settings(**chosen: object) -> TranslationSettings:
    """A run of seconds."""
    values: dict[str, object] = {
        "corpora": ("files",),
        "prefixes": ("train", "valid", "test"),
        "source": "xx",
        "target": "yy",
        "vocabulary": 60,
        "size": "tiny",
        "max_tokens": 384,
        "epochs": None,
        "schedule": "cosine",
        "label_smoothing": 0.0,
        "weight_decay": 0.0,
        "clip_norm": 1.0,
        "evaluated": 10,
        "beams": 2,
        **chosen,
    }
    return TranslationSettings(**values)  # type: ignore[arg-type]


def pairs(folder: Path) -> TranslationSet:
    return prepare(recipe_of(settings()), folder)
