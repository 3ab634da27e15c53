"""The paper's Table 5: swap the encoder's self-attention of a trained translation model, score, calibrate, fine-tune.

Every base is trained once per seed, by `train`, in a folder of its own that outlives the table, or is a checkpoint that
somebody else has trained. From there a row of the table is one chain, each link of which is a cell: the swapped model,
the same calibrated without labels, the same fine-tuned on pairs. The softmax row is fine-tuned as long as the others.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from lotformer import conversion
from lotformer.cli.tables import Table
from lotformer.cli.terminal import Listener
from lotformer.data.folder import data_folder
from lotformer.settings import setting

from ...data.translation.sets import TranslationSet, prepare
from ...results.cells import Origin, Record
from ...results.report import largest
from ...results.sources import Source, checkpoint_source
from ..engine import Cells, Experiment, Job, Told, alike
from ..inputs import PAIRS, PairsData
from .rows import ROWS
from .scoring import require_sacrebleu
from .settings import TranslationSettings, completed, recipe_of

Runs = Annotated[Path, typer.Option(help="Folder in which bases are trained and kept.")]

BASES = ("transformer", "diff")
STAGES = ("swapped", "calibrated", "fine-tuned")

_TITLES = {"transformer": "Transformer", "diff": "DiffTransformer"}
_OF_THE_TABLE = ("bases", "rows", "stages", "seeds", "base")


@dataclass(frozen=True)
class TableSettings(TranslationSettings):
    """Rows and the budget of each cell; the rest is the training of bases."""

    bases: tuple[str, ...] = setting(BASES, f"Trained here: {', '.join(BASES)}.")
    base: Path | None = setting(None, "A trained Marian checkpoint in place of --bases.")
    rows: tuple[str, ...] = setting(("softmax", "sinkformer", "espformer", "lot"), f"Rows: {', '.join(ROWS)}.")
    stages: tuple[str, ...] = setting(STAGES, f"Columns: {', '.join(STAGES)}.")
    seeds: tuple[int, ...] = setting((0,), "Runs per cell, base included.", at_least=0)
    calibration_steps: int = setting(250, "Steps of calibration.", at_least=1)
    calibration_pairs: int = setting(2000, "Source sentences to calibrate on.", at_least=1)
    finetuning_steps: int = setting(1000, "Steps of fine-tuning.", at_least=1)
    finetuning_lr: float = setting(1e-4, "Learning rate of the original weights in it.", at_least=0)
    mechanism_lr: float = setting(1e-3, "Learning rate of the new parameters in it.", at_least=0)
    scored: int | None = setting(None, "Test sentences that are scored; all if not given.", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("bases", BASES), ("rows", ROWS), ("stages", STAGES)):
            for value in getattr(self, name):
                if value not in known:
                    raise ValueError(f"{name} must be among {', '.join(known)}, got {value!r}.")

    def training(self, backbone: str, seed: int) -> TranslationSettings:
        """The settings of the run that makes a base."""
        shared = {field.name: getattr(self, field.name) for field in dataclasses.fields(TranslationSettings)}
        return TranslationSettings(**{**shared, "backbone": backbone, "seed": seed})

    def of_a_cell(self) -> dict[str, Any]:
        """The origin of a cell, beside its place in the table and its base."""
        return {
            name: value for name, value in self.described().items() if name not in (*_OF_THE_TABLE, "backbone", "seed")
        }


@dataclass(frozen=True)
class Cell:
    """One model, scored on the test set.

    `column_error` is the largest relative deviation of a column sum from its mass, in any layer, head and sentence
    looked at; `doubly_stochastic_error` the mean deviation from 1. `seconds` are those of this stage's learning.
    """

    base: str
    row: str
    stage: str
    seed: int
    bleu: float
    chrf: float
    bleu_signature: str
    chrf_signature: str
    sentences: int
    column_error: float | None
    doubly_stochastic_error: float | None
    seconds: float
    decoding_seconds: float


def plan(
    settings: TableSettings, listen: Listener, data_dir: PairsData = None, runs: Runs = Path("out/translation-runs")
) -> Iterator[Job]:
    """A job for every row of every base; bases that are not there are trained first."""
    pairs = prepare(recipe_of(settings), data_folder(data_dir, PAIRS))
    data = Source(pairs.folder.name, pairs.fingerprint)
    for seed in settings.seeds:
        for name in (_name(settings.base),) if settings.base else settings.bases:
            place = settings.base or _trained(settings.training(name, seed), pairs, runs / f"{name}-seed{seed}", listen)
            origin = Origin(settings.of_a_cell(), {"base": checkpoint_source(place), "data": data})
            bench = _Bench(name, place, seed, settings, pairs, listen)
            for row in settings.rows:
                stages = [stage for stage in _chain(row) if stage in settings.stages]
                names = [bench.cell_name(row, stage) for stage in stages]
                yield Job(dict.fromkeys(names, origin), partial(bench.fill, row, stages), seed)


def _chain(row: str) -> list[str]:
    return [stage for stage in STAGES if stage != "calibrated" or ROWS[row].calibrated]


def _name(base: Path) -> str:
    """Of a checkpoint that was not trained here."""
    return base.resolve().name


def _trained(settings: TranslationSettings, pairs: TranslationSet, place: Path, listen: Listener) -> Path:
    """The base's checkpoint, trained now as far as it has not been."""
    from lotformer.training.run import train

    from .task import MODEL, Translation

    task = Translation(settings, pairs)
    # a run that is finished takes no step, but one with other settings is refused
    train(task, place, resume=True, listeners=[Told(f"training {place.name}", listen)])
    return place / MODEL if (place / MODEL / "config.json").is_file() else task.export(place)


class _Bench:
    """One base with one seed, and the cells made from it."""

    def __init__(
        self, base: str, place: Path, seed: int, settings: TableSettings, pairs: TranslationSet, listen: Listener
    ) -> None:
        self.base, self.place, self.seed, self.settings, self.listen = base, place, seed, settings, listen
        self.train = pairs["train"]
        self._epoch: list[Any] | None = None
        test = pairs["test"]
        count = min(len(test), settings.scored or len(test))
        self.test = [test[i * len(test) // count] for i in range(count)]

    def cell_name(self, row: str, stage: str) -> str:
        return f"{self.base}-{row}-{stage}-seed{self.seed}"

    def fill(self, row: str, stages: Sequence[str], cells: Cells) -> None:
        """The cells of a row that are missing. A stage begins where the one before it ended."""
        missing = [stage for stage in stages if cells.find(self.cell_name(row, stage)) is None]
        chain = _chain(row)
        self._load()
        for stage in chain[: chain.index(missing[-1]) + 1]:
            start, name = time.perf_counter(), self.cell_name(row, stage)
            own = stage in missing
            self._learn(row, stage, cells.begin(name) if own else None)
            if own:
                seconds = time.perf_counter() - start
                s = self.settings
                steps = {"calibration_steps": s.calibration_steps, "finetuning_steps": s.finetuning_steps}
                cells.finish(name, self._scored(row, stage, seconds), {"seconds": seconds, **steps})

    def _load(self) -> None:
        from .decoding import load

        self.model, self.tokenizer = load(self.place)

    def _learn(self, name: str, stage: str, checkpoint: Path | None) -> None:
        from . import conversions

        s, row = self.settings, ROWS[name]
        what = f"{self.base}, {name}, seed {self.seed}"
        if stage == "swapped":
            conversions.swap(self.model, row, self.seed)
        elif stage == "calibrated":
            stride = max(1, len(self.train) // s.calibration_pairs)
            chosen = self.train[::stride][: s.calibration_pairs]
            batches = conversions.batches_of(self.model, self.tokenizer, chosen, s.max_tokens, self.seed)
            conversions.calibrate(
                self.model,
                batches,
                steps=s.calibration_steps,
                seed=self.seed,
                checkpoint=checkpoint,
                on_step=lambda now, total, _: self.listen(f"{what}: calibrating", now, total),
            )
        else:
            if self._epoch is None:  # every row learns from the same batches
                self._epoch = conversions.batches_of(self.model, self.tokenizer, self.train, s.max_tokens, self.seed)
            conversions.finetune(
                self.model,
                self._epoch,
                steps=s.finetuning_steps,
                lr=s.finetuning_lr,
                mechanism_lr=s.mechanism_lr,
                label_smoothing=s.label_smoothing,
                seed=self.seed,
                checkpoint=checkpoint,
                on_step=lambda now, total, _: self.listen(f"{what}: fine-tuning", now, total),
            )

    def _scored(self, name: str, stage: str, seconds: float) -> Cell:
        from . import conversions
        from .decoding import translate
        from .scoring import score

        s, what = self.settings, f"{self.base}, {name}, {stage}: translating"
        self.model.eval()
        start = time.perf_counter()
        made = translate(
            self.model,
            self.tokenizer,
            [source for source, _ in self.test],
            beams=s.beams,
            on_batch=lambda done, total: self.listen(what, done, total),
        )
        decoding = time.perf_counter() - start
        found = score(made, [target for _, target in self.test], tokenized=s.tokenized)
        looked_at = conversions.batches_of(
            self.model, self.tokenizer, self.test[:: max(1, len(self.test) // 64)], 1024, 0
        )
        quality = conversion.coupling_quality(self.model, looked_at)
        column = None if quality is None else quality.residual_max
        if quality is not None and column is None:
            column = quality.doubly_stochastic_max  # without masses of their own, columns should sum to 1
        return Cell(
            base=self.base,
            row=name,
            stage=stage,
            seed=self.seed,
            bleu=found.bleu,
            chrf=found.chrf,
            bleu_signature=found.bleu_signature,
            chrf_signature=found.chrf_signature,
            sentences=len(self.test),
            column_error=column,
            doubly_stochastic_error=None if quality is None else quality.doubly_stochastic_mean,
            seconds=seconds,
            decoding_seconds=decoding,
        )


def _tables(records: list[Record]) -> list[Table]:
    """The paper's table, and beside it what the couplings were and what was spent."""
    cells = [record.cell for record in records]
    return [_scores(cells), _quality(cells)]


def _notes(records: list[Record]) -> list[str]:
    return [
        "A short budget: comparable with each other, not with the paper's 25 + 10 epochs on IWSLT'14.",
        "Medians over seeds. Δ: fine-tuned BLEU relative to the softmax row of the same base, fine-tuned as long.",
        "Swapped: nothing but the encoder's self-attention is replaced, no training. Calibrated: the new parameters "
        "alone, on source sentences. Fine-tuned: all weights, on pairs, after both. The first two are checked to leave "
        "all other weights bitwise as they were, and the swap to leave the decoder's output on fixed encoder states.",
        "lot: the paper's (32 random pivots, ε = 1, five sweeps, uniform masses); lot-exact: ε = 0.1, solved to "
        "rounding, learned key masses; lot-aware: the same with pivots that see the input; lot-near: and a window "
        "of five tokens read by softmax.",
        "Column error: the largest relative deviation of a column sum from its mass; d.s. error: the mean deviation "
        "from 1.",
        *alike(records, lambda record: f"BLEU {record.cell.bleu_signature}; chrF {record.cell.chrf_signature}."),
        *alike(records, _budget),
    ]


def _budget(record: Record) -> str:
    s = record.origin.settings
    length = f"{s['epochs']:g} epochs" if s["epochs"] is not None else f"{s['steps']} steps"
    return (
        f"{record.origin.sources['data'].name}, {record.cell.sentences} test sentences, beam {s['beams']}. "
        f"Bases trained here: size {s['size']}, {s['vocabulary']} tokens, {length}, {s['max_tokens']} tokens a step, "
        f"lr {s['lr']:g}, {s['schedule']}, dropout {s['dropout']}. Calibration: {s['calibration_steps']} steps on "
        f"{s['calibration_pairs']} sentences. Fine-tuning: {s['finetuning_steps']} steps, lr {s['finetuning_lr']:g}, "
        f"new parameters {s['mechanism_lr']:g}. {record.provenance.where()}."
    )


def _places(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    """Base and row, in the order of the paper's table."""
    bases = sorted({cell.base for cell in cells}, key=lambda base: (BASES.index(base) if base in BASES else 9, base))
    return [
        (base, row) for base in bases for row in ROWS if any((cell.base, cell.row) == (base, row) for cell in cells)
    ]


def _median(cells: Sequence[Cell], base: str, row: str, stage: str) -> float | None:
    found = [cell.bleu for cell in cells if (cell.base, cell.row, cell.stage) == (base, row, stage)]
    return statistics.median(found) if found else None


def _scores(cells: Sequence[Cell]) -> Table:
    rows = []
    for base, row in _places(cells):
        values = [_median(cells, base, row, stage) for stage in STAGES]
        reference = _median(cells, base, "softmax", "fine-tuned")
        gain = "–" if values[-1] is None or reference is None or row == "softmax" else f"{values[-1] - reference:+.2f}"
        shown = ["–" if value is None else f"{value:.2f}" for value in values]
        rows.append((_TITLES.get(base, base), row, *shown, gain))
    return Table("BLEU", ("Base", "Encoder attention", "Swapped", "Calibrated", "Fine-tuned", "Δ"), tuple(rows), left=2)


def _quality(cells: Sequence[Cell]) -> Table:
    columns = (
        "Base, row, stage",
        "seeds",
        "BLEU",
        "chrF",
        "column\nerror, max",
        "d.s. error,\nmean",
        "learning,\nseconds",
    )
    rows = []
    for base, row in _places(cells):
        for stage in STAGES:
            group = [cell for cell in cells if (cell.base, cell.row, cell.stage) == (base, row, stage)]
            if not group:
                continue
            means = [c.doubly_stochastic_error for c in group if c.doubly_stochastic_error is not None]
            rows.append(
                (
                    f"{base}, {row}, {stage}",
                    str(len(group)),
                    " / ".join(f"{cell.bleu:.2f}" for cell in group),
                    f"{statistics.median(cell.chrf for cell in group):.1f}",
                    largest((cell.column_error for cell in group), digits=1),
                    f"{statistics.median(means):.2f}" if means else "–",
                    f"{statistics.median(cell.seconds for cell in group):.0f}",
                )
            )
    return Table("What each model is", columns, tuple(rows))


EXPERIMENT = Experiment(
    name="translation",
    about="Table 5: swap the encoder's attention of a trained Transformer and DiffTransformer, calibrate, fine-tune.",
    settings=TableSettings,
    completed=completed,
    cell=Cell,
    plan=plan,
    tables=_tables,
    notes=_notes,
    require=require_sacrebleu,
    extras=("text",),
)
