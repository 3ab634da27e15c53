"""Recordings from files that may be damaged, strung together to clips, and what was said in them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..extras import needed_for
from ..reading import decoding, read_lines, require_file

SUFFIXES = (".wav", ".flac", ".ogg")
TRANSCRIPTS = "transcripts.tsv"
"""Beside recordings: a header, then the name of a file and its text on each line, with a tab between them."""

_PAUSE = 0.5  # seconds between recordings of one clip


@dataclass(frozen=True)
class Clip:
    """Sound as a wave of one channel, and what is said in it, if that is known of all of it."""

    wave: np.ndarray
    text: str | None


def read_sound(path: Path, rate: int) -> np.ndarray:
    """The recording in a file as samples from -1 to 1, `rate` a second; the mean of its channels.

    Raises:
        OSError: there is no such file, or it is a folder, a pipe or a device.
        ValueError: it cannot be decoded.
        ModuleNotFoundError: no decoder of files of its kind is installed.
    """
    require_file(path)
    if path.suffix.lower() == ".wav":
        with needed_for("reading recordings", "text"):
            from scipy.io import wavfile
        with decoding(path, "a WAV file"):
            given, samples = wavfile.read(path)
            if samples.dtype.kind == "u":  # 8 bits are unsigned, around 128
                samples = (samples.astype(np.float32) - 128) / 128
            elif samples.dtype.kind == "i":
                samples = samples.astype(np.float32) / -float(np.iinfo(samples.dtype).min)
    else:
        with needed_for(f"reading {path.suffix} files", "audio"):
            import soundfile
        with decoding(path, "a recording"):
            samples, given = soundfile.read(str(path), dtype="float32")
    wave = samples.mean(-1) if samples.ndim > 1 else samples
    if not wave.size:
        raise ValueError(f"{path} holds no sound.")
    return _resampled(wave.astype(np.float32), given, rate)


def _resampled(wave: np.ndarray, given: int, rate: int) -> np.ndarray:
    if given == rate:
        return wave
    with needed_for("recordings of another sampling rate", "text"):
        from scipy.signal import resample_poly
    common = math.gcd(given, rate)
    return resample_poly(wave, rate // common, given // common).astype(np.float32)


def sound_files(folder: Path) -> list[Path]:
    """The recordings in a folder and its sub-folders, by name.

    Raises:
        ValueError: there are none.
    """
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not files:
        raise ValueError(f"{folder} holds no recording ({', '.join(SUFFIXES)}).")
    return files


def transcripts(files: Iterable[Path]) -> dict[Path, str]:
    """Transcripts of those files that the table beside them names.

    Raises:
        ValueError: a line of a table is not a name and a text.
    """
    wanted = set(files)
    found = {}
    for folder in sorted({path.parent for path in wanted}):
        table = folder / TRANSCRIPTS
        if not table.is_file():
            continue
        for number, line in enumerate(read_lines(table)[1:], 2):
            name, tab, text = line.partition("\t")
            if not tab:
                raise ValueError(f"{table}, line {number}: expected a file's name, a tab and its text, got {line!r}.")
            if folder / name in wanted:
                found[folder / name] = text
    return found


def clips(files: Sequence[Path], rate: int, seconds: float) -> list[Clip]:
    """Recordings in a row, with a pause between them, as many to a clip as fit; longer ones are cut.

    A model that reads so many seconds at a time, however short a recording is, should not learn from silence.
    """
    said: Mapping[Path, str] = transcripts(files)
    longest, pause = round(seconds * rate), np.zeros(round(_PAUSE * rate), np.float32)
    made: list[Clip] = []
    waves: list[np.ndarray] = []
    texts: list[str | None] = []

    def finish() -> None:
        if waves:
            known = [text for text in texts if text is not None]
            made.append(Clip(np.concatenate(waves), " ".join(known) if len(known) == len(texts) else None))
        waves.clear()
        texts.clear()

    for path in files:
        wave, text = read_sound(path, rate), said.get(path)
        if len(wave) > longest:
            finish()
            made += [Clip(wave[i : i + longest], None) for i in range(0, len(wave), longest)]
            continue
        if waves and sum(map(len, waves)) + len(pause) + len(wave) > longest:
            finish()
        waves += [pause, wave] if waves else [wave]
        texts.append(text)
    finish()
    return made


def words(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation."""
    return re.findall(r"[\w']+", text.lower())


def word_error_rate(found: Sequence[str], expected: Sequence[str]) -> float:
    """Words to insert, delete or replace, over the words expected."""
    changes = sum(_distance(words(a), words(b)) for a, b in zip(found, expected, strict=True))
    return changes / max(1, sum(len(words(text)) for text in expected))


def _distance(a: Sequence[str], b: Sequence[str]) -> int:
    """Levenshtein's."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        above, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (x != y))
    return row[-1]
