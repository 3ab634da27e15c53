"""BLEU and chrF by sacreBLEU, with the signature that says how they were counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Score:
    """Of a whole set; both in percent."""

    bleu: float
    chrf: float
    bleu_signature: str
    chrf_signature: str


def require_sacrebleu() -> None:
    """Notice before the work begins that scores could not be counted."""
    try:
        import sacrebleu  # noqa: F401
    except ImportError as error:
        raise ImportError("BLEU needs sacrebleu: pip install 'lotformer[text]'.") from error


def score(hypotheses: Sequence[str], references: Sequence[str], *, tokenized: bool = False) -> Score:
    """Corpus BLEU and chrF against one reference each.

    Args:
        tokenized: the texts are tokenised already, and BLEU counts their tokens as they are.
    """
    require_sacrebleu()
    from sacrebleu.metrics import BLEU, CHRF

    bleu, chrf = BLEU(tokenize="none" if tokenized else "13a", force=tokenized), CHRF()
    found = bleu.corpus_score(list(hypotheses), [list(references)])
    letters = chrf.corpus_score(list(hypotheses), [list(references)])
    return Score(found.score, letters.score, str(bleu.get_signature()), str(chrf.get_signature()))
