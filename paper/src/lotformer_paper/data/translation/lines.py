"""Aligned text files: line i of one is the translation of line i of the other."""

from __future__ import annotations

from pathlib import Path

from lotformer.reading import read_lines

Pair = tuple[str, str]
"""A sentence and its translation."""


def read_pairs(source: Path, target: Path) -> list[Pair]:
    """The pairs of two aligned files, plain or gzipped.

    Raises:
        FileNotFoundError: one is missing.
        ValueError: one is empty or not UTF-8, or their numbers of lines differ; the message names file and line.
    """
    ours, theirs = read_lines(source), read_lines(target)
    if len(ours) != len(theirs):
        longer, count = (source, len(ours)) if len(ours) > len(theirs) else (target, len(theirs))
        first = min(len(ours), len(theirs)) + 1
        raise ValueError(
            f"{source} has {len(ours)} lines and {target} {len(theirs)}: line {first} of {longer.name} (of {count}) "
            "has no partner. Expected one translation per line."
        )
    return list(zip(ours, theirs, strict=True))


def require_text(pairs: list[Pair], names: tuple[str, str]) -> None:
    """Refuse pairs of a set to be scored that lack a side: they could not be left out unnoticed.

    Raises:
        ValueError: naming the file and the line.
    """
    for number, pair in enumerate(pairs, 1):
        for text, name in zip(pair, names, strict=True):
            if not text.strip():
                raise ValueError(f"{name}, line {number}: empty. Expected a sentence, as this set is scored.")
