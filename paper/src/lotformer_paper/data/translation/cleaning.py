"""Filter of sentence pairs: the rules of Moses' `clean-corpus-n`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .lines import Pair

_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Cleaning:
    """Keep a pair if both sides have `shortest` to `longest` words and neither has over `ratio` times the other's.

    A run of letters and digits counts as a word, and so does every other visible character, as in tokenised text.
    """

    lowercase: bool = True
    shortest: int = 1
    longest: int = 175
    ratio: float = 1.5

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(f"lengths must be 1 ≤ shortest ≤ longest, got {self.shortest} and {self.longest}.")
        if self.ratio < 1:
            raise ValueError(f"ratio must be at least 1, got {self.ratio}.")

    def normalised(self, text: str) -> str:
        """One space between words, none at the ends; lower case if that was chosen."""
        text = " ".join(text.split())
        return text.lower() if self.lowercase else text

    def pair(self, pair: Pair) -> Pair:
        return self.normalised(pair[0]), self.normalised(pair[1])

    def kept(self, pairs: Iterable[Pair]) -> list[Pair]:
        """The pairs that are fit, normalised, in their order."""
        normalised = map(self.pair, pairs)
        return [pair for pair in normalised if self.fits(pair)]

    def fits(self, pair: Pair) -> bool:
        fewer, more = sorted(len(_WORD.findall(text)) for text in pair)
        return self.shortest <= fewer and more <= self.longest and more <= self.ratio * fewer
