"""Recordings for `lotformer convert --audio`: inputs of a speech model, and their transcripts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..data.batches import Batch
from ..data.sound import Clip, clips, read_sound, sound_files
from ..data.text import load_tokenizer

_SECONDS = 30.0  # of a clip, where the model does not say how many it takes
_LOOKED_AT = 16  # recordings, to tell how long they are


@dataclass(frozen=True)
class Recordings:
    """Batches of one clip each, to learn from and to compare on.

    `transcribe` writes down the clips to compare on, if the model can; `said` is what is said in each, None where that
    is not known.
    """

    learned: Sequence[Batch]
    held: Sequence[Batch]
    transcribe: Callable[[], list[str]] | None = None
    said: Sequence[str | None] = ()


def read_recordings(
    root: Path, model: Any, library: Any, folder: Path | None, steps: int, apart: Callable[[list[Clip]], Any]
) -> Recordings:
    """As many clips as steps learn from, and a quarter more of which some are kept back; evenly over the folder.

    Without steps, nothing is read.
    """
    if not steps:
        return Recordings([], [])
    if folder is None:
        raise ValueError("a speech model learns from recordings: give a folder of them, --audio.")
    extractor = library.AutoFeatureExtractor.from_pretrained(str(root))
    rate, seconds = extractor.sampling_rate, float(getattr(extractor, "chunk_length", None) or _SECONDS)
    files = _chosen(sound_files(folder), rate, seconds * max(10, steps + steps // 4))
    learned, held = apart(clips(files, rate, seconds))

    def heard(clip: Clip) -> dict[str, Any]:
        return dict(extractor(clip.wave, sampling_rate=rate, return_tensors="pt"))

    batches = [heard(clip) for clip in held]
    if not (model.config.is_encoder_decoder and model.can_generate()):
        return Recordings([heard(clip) for clip in learned], batches)
    tokenizer = load_tokenizer(root)

    @torch.no_grad()
    def transcribe() -> list[str]:
        made = [model.generate(**batch, num_beams=1, do_sample=False) for batch in batches]
        return [tokenizer.decode(ids[0], skip_special_tokens=True) for ids in made]

    return Recordings([heard(clip) for clip in learned], batches, transcribe, [clip.text for clip in held])


def _chosen(files: list[Path], rate: int, seconds: float) -> list[Path]:
    """About as many files as make so many seconds, evenly over all."""
    if len(files) <= _LOOKED_AT:
        return files
    lengths = [len(read_sound(path, rate)) / rate for path in _spread(files, _LOOKED_AT)]
    return _spread(files, min(len(files), round(seconds * len(lengths) / sum(lengths)) + 1))


def _spread(files: list[Path], count: int) -> list[Path]:
    return [files[i * len(files) // count] for i in range(count)]
