"""Aligned text files: line i of one is the translation of line i of the other."""

from __future__ import annotations

import gzip
from pathlib import Path

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


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 file, gzipped if its name says so, without their ends.

    Lines end at line feeds only: texts may hold other separators of Unicode's.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing.")
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{path} is not a gzip file, or is damaged: {error}.") from error
    return decoded_lines(content, str(path))


def decoded_lines(content: bytes, name: str) -> list[str]:
    """The lines of a file's content; `name` is the file's, for errors."""
    raw = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if raw[-1] == b"":
        raw.pop()  # the end of the last line, not a line
    if not raw:
        raise ValueError(f"{name} is empty: expected text in its line 1.")
    lines = []
    for number, line in enumerate(raw, 1):
        try:
            lines.append(line.decode("utf-8").removesuffix("\r"))
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{name}, line {number}: not UTF-8 (byte 0x{line[error.start]:02x} at position {error.start + 1}). "
                "Convert the file to UTF-8."
            ) from error
    return lines


def require_text(pairs: list[Pair], names: tuple[str, str]) -> None:
    """Refuse pairs of a set to be scored that lack a side: they could not be left out unnoticed.

    Raises:
        ValueError: naming the file and the line.
    """
    for number, pair in enumerate(pairs, 1):
        for text, name in zip(pair, names, strict=True):
            if not text.strip():
                raise ValueError(f"{name}, line {number}: empty. Expected a sentence, as this set is scored.")
