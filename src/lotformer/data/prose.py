"""English prose that every CPython carries: the language reference in `pydoc_data.topics`."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_LENGTHS = (5, 10)  # sentences of a passage: about 120 and 250 tokens, of which some are farther apart than a window


@dataclass(frozen=True)
class Prose:
    """Passages to calibrate on, and passages from other topics that are kept back."""

    calibration: list[str]
    held_back: list[str]


def python_reference(held_back_every: int = 4) -> Prose:
    """Passages of Python's reference; every fourth topic is kept back as a whole.

    They are five or ten sentences long. To learn from, a topic is cut both ways; what is kept back is cut one way or
    the other, since passages that hold each other would be nearest neighbours whatever a model made of them. A sentence
    that topics share is in the first of them alone.
    """
    from pydoc_data.topics import topics

    names = sorted(topics)
    held = names[::held_back_every]
    seen: set[str] = set()
    kept_back: list[str] = []
    for index, name in enumerate(held):
        kept_back += _passages(_new_sentences(topics[name], seen), _LENGTHS[index % len(_LENGTHS)])
    calibration: list[str] = []
    for name in names:
        sentences = _new_sentences(topics[name], seen) if name not in held else []
        for length in _LENGTHS:
            calibration += _passages(sentences, length)
    return Prose(calibration, kept_back)


def _new_sentences(text: str, seen: set[str]) -> list[str]:
    """Without those seen before, which these then have been."""
    new = [sentence for sentence in dict.fromkeys(_sentences(text)) if sentence not in seen]
    seen.update(new)
    return new


def _passages(sentences: list[str], length: int) -> list[str]:
    runs = (sentences[start : start + length] for start in range(0, len(sentences), length))
    return [" ".join(run) for run in runs if 2 * len(run) > length]


def _sentences(text: str) -> list[str]:
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.splitlines()
        if any(line.startswith("     ") or ">>>" in line or "::=" in line for line in lines):
            continue  # code and grammar
        joined = re.sub(r"[*`\"_|]+", "", " ".join(line.strip() for line in lines))
        for sentence in _SENTENCE_END.split(joined):
            words = sentence.split()
            letters = sum(character.isalpha() or character == " " for character in sentence)
            if 6 <= len(words) <= 60 and letters > 0.85 * len(sentence) and sentence[0].isupper():
                found.append(sentence)
    return found
