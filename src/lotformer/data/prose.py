"""English prose that every CPython carries: the language reference in `pydoc_data.topics`."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


@dataclass(frozen=True)
class Prose:
    """Sentences to calibrate on, and sentences from other topics that are kept back."""

    calibration: list[str]
    held_back: list[str]


def python_reference(held_back_every: int = 5) -> Prose:
    """Sentences of Python's reference, each once; every fifth topic is kept back as a whole."""
    from pydoc_data.topics import topics

    parts: dict[bool, dict[str, None]] = {False: {}, True: {}}
    for index, name in enumerate(sorted(topics)):
        held = index % held_back_every == 0
        for sentence in _sentences(topics[name]):
            parts[held].setdefault(sentence)
    calibration = [sentence for sentence in parts[False] if sentence not in parts[True]]
    return Prose(calibration, list(parts[True]))


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
