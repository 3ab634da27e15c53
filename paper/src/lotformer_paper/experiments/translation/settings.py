"""Settings of a translation run: fairseq's recipe for IWSLT'14, with everything in reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lotformer.settings import Settings, setting
from lotformer.training.settings import TrainSettings

from ...data.translation.cleaning import Cleaning
from ...data.translation.sets import Recipe


@dataclass(frozen=True)
class PairSettings(Settings):
    """The pairs, their cleaning and their tokens."""

    corpora: tuple[str, ...] = setting(("multi30k",), "multi30k, tatoeba, iwslt14 or files; the first one is scored.")
    source: str = setting("de", "Language to translate from, as files are named after it.")
    target: str = setting("en", "Language to translate to.")
    prefixes: tuple[str, ...] = setting((), "For files: what comes before .<language>, for train, valid and test.")
    vocabulary: int = setting(10_000, "Tokens of the joint byte-pair vocabulary.", at_least=16)
    lowercase: bool = setting(True, "Lower-case both sides.")
    longest: int = setting(175, "Most words of a training sentence.", at_least=1)
    ratio: float = setting(1.5, "Most words of a side for every word of the other.", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        recipe_of(self)  # what cannot be is refused now


@dataclass(frozen=True)
class TranslationSettings(TrainSettings, PairSettings):
    """A run of `lotformer train translation`. The defaults are fairseq's for IWSLT'14."""

    backbone: Literal["transformer", "diff"] = setting("transformer", "Softmax or differential attention.")
    size: str = setting("iwslt", "iwslt (fairseq's size for IWSLT'14), small or tiny.")
    dropout: float | None = setting(None, "Of the residual branches; 0.3, but for tiny.", at_least=0, at_most=1)
    max_tokens: int = setting(
        4096, "Most tokens of a side per update, padding counted, over all processes.", at_least=1
    )
    batch_size: int = setting(1024, "Most sentences per update, over all processes.", at_least=1)
    beams: int = setting(5, "Beams when validation sentences are translated.", at_least=1)
    evaluated: int | None = setting(None, "Validation sentences that are translated; all if not given.", at_least=1)
    tokenized: bool = setting(False, "The texts are tokenised already: BLEU counts their tokens as they are.")
    epochs: float | None = setting(25.0, "Passes over the data, unless --steps is given.", at_least=0)
    lr: float = setting(5e-4, "Peak learning rate.", at_least=0)
    schedule: Literal["cosine", "one-cycle", "inverse-sqrt"] = setting("inverse-sqrt", "How the learning rate falls.")
    warmup_steps: int = setting(4000, "Updates during which the learning rate rises.", at_least=0)
    weight_decay: float = setting(1e-4, "Of AdamW; never applied to norms and biases.", at_least=0)
    betas: tuple[float, ...] = setting((0.9, 0.98), "Of AdamW.", at_least=0, at_most=1)
    clip_norm: float | None = setting(None, "Largest norm of the gradient.", at_least=0)
    label_smoothing: float = setting(0.1, "Share of the target spread over the other tokens.", at_least=0, at_most=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tokens % self.accumulate:
            raise ValueError(
                f"max_tokens must be a multiple of accumulate, got {self.max_tokens} and {self.accumulate}."
            )

    def described(self) -> dict[str, Any]:
        """Without the places of files, whose contents the data are described by."""
        return {name: value for name, value in super().described().items() if name != "prefixes"}


def completed(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The chosen settings; a number of steps takes the place of the recipe's epochs."""
    return {**({"epochs": None} if "steps" in chosen else {}), **chosen}


def recipe_of(settings: PairSettings) -> Recipe:
    """The prepared set that the settings ask for."""
    return Recipe(
        corpora=settings.corpora,
        source=settings.source,
        target=settings.target,
        cleaning=Cleaning(settings.lowercase, longest=settings.longest, ratio=settings.ratio),
        vocabulary=settings.vocabulary,
        prefixes=tuple(map(Path, settings.prefixes)),
    )
