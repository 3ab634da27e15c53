"""English prose that every CPython carries: the language reference in `pydoc_data.topics`."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_LENGTHS = (3, 9)  # sentences of a passage: about 75 and 220 tokens, longer than the window that text encoders get


@dataclass(frozen=True)
class Prose:
    """Passages to calibrate on, and passages from other topics that are kept back."""

    calibration: list[str]
    held_back: list[str]


def python_reference(held_back_every: int = 5) -> Prose:
    """Passages of Python's reference; every fifth topic is kept back as a whole.

    They are three or nine sentences long, and a sentence is in one passage of each kind: topics repeat each other.
    """
    from pydoc_data.topics import topics

    names = sorted(topics)
    held = names[::held_back_every]
    seen: set[str] = set()
    kept_back = _passages([topics[name] for name in held], seen)
    return Prose(_passages([topics[name] for name in names if name not in held], seen), kept_back)


def _passages(texts: list[str], seen: set[str]) -> list[str]:
    """Sentences that follow each other in a text, without those seen before, which then have been."""
    found = []
    for text in texts:
        new = [sentence for sentence in dict.fromkeys(_sentences(text)) if sentence not in seen]
        seen.update(new)
        for length in _LENGTHS:
            runs = (new[start : start + length] for start in range(0, len(new), length))
            found += [" ".join(run) for run in runs if 2 * len(run) > length]
    return found


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
