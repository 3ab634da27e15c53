"""Fidelity of a conversion to the original, stage by stage, on inputs that were kept back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .. import conversion
from ..conversion.hosts.sites import softmax_up_to, transporting
from ..conversion.measuring.fidelity import fidelity
from ..data.sound import word_error_rate
from .subjects import Subject
from .tables import Table


@dataclass(frozen=True)
class _Measure:
    """Columns of the table, and their cells for the model as it is now."""

    columns: tuple[str, ...]
    cells: Callable[[], tuple[str, ...]]


class Comparison:
    """Made of the original, before it is converted."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.measures = [_states(subject)] if subject.is_sound else [_embeddings(subject)]
        self.measures += _translations(subject) + _transcripts(subject)
        self.rows: list[tuple[str, ...]] = []
        if any(text is not None for text in subject.said):  # the original makes errors, too
            self.rows.append(("softmax", *self._cells(), "–", "–", "–"))

    def add(self, stage: str, seconds: float) -> None:
        with transporting(self.subject.body):
            cells = self._cells()
            quality = conversion.coupling_quality(self.subject.body, self.subject.held[:2])
        residual = "–" if quality is None or quality.residual_max is None else f"{quality.residual_max:.0e}"
        error = "–" if quality is None else f"{quality.doubly_stochastic_mean:.2g}"
        self.rows.append((stage, *cells, residual, error, f"{seconds:.0f}"))

    def table(self) -> Table:
        subject = self.subject
        columns = ["", *(column for measure in self.measures for column in measure.columns)]
        columns += ["residual,\nmax", "d.s. error,\nmean", "seconds"]
        title = f"What is left of the original, on {subject.count} inputs kept back"
        title += f", of up to {subject.longest} tokens" if subject.longest else ""
        short = softmax_up_to(subject.body)
        title += f"; read by LOT, though the model reads inputs of up to {short} tokens as before" if short else ""
        return Table(title, tuple(columns), tuple(self.rows))

    def _cells(self) -> tuple[str, ...]:
        return tuple(cell for measure in self.measures for cell in measure.cells())


def _embeddings(subject: Subject) -> _Measure:
    original = subject.embeddings()

    def cells() -> tuple[str, ...]:
        kept = fidelity(original, subject.embeddings())
        return f"{kept.cosine:.4f}", f"{kept.rank_correlation:.4f}", f"{100 * kept.neighbour_agreement:.0f} %"

    return _Measure(("cosine", "rank\ncorrelation", "same nearest\nneighbour"), cells)


def _states(subject: Subject) -> _Measure:
    """Token by token: whoever transcribes reads every state, not their mean."""
    original = subject.states()
    return _Measure(("cosine of\nstates",), lambda: (f"{float((original * subject.states()).sum(-1).mean()):.4f}",))


def _translations(subject: Subject) -> list[_Measure]:
    translate = subject.translate
    if translate is None or not _can_score():
        return []
    original = translate()
    column = "BLEU against the\noriginal's translations"
    return [_Measure((column,), lambda: (f"{_bleu(translate(), original):.1f}",))]


def _transcripts(subject: Subject) -> list[_Measure]:
    transcribe, said = subject.transcribe, subject.said
    if transcribe is None:
        return []
    original = transcribe()
    known = [index for index, text in enumerate(said) if text is not None]

    def cells() -> tuple[str, ...]:
        found = transcribe()
        unlike = f"{100 * word_error_rate(found, original):.1f} %"
        if not known:
            return (unlike,)
        errors = word_error_rate([found[i] for i in known], [said[i] or "" for i in known])
        return f"{100 * errors:.1f} %", unlike

    return [_Measure((*(["word\nerrors"] if known else []), "words unlike\nthe original's"), cells)]


def _can_score() -> bool:
    try:
        import sacrebleu  # noqa: F401
    except ImportError:
        return False
    return True


def _bleu(found: list[str], references: list[str]) -> float:
    from sacrebleu.metrics import BLEU

    return float(BLEU().corpus_score(found, [references]).score)
