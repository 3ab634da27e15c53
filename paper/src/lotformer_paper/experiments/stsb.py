"""STS-B without labels: convert a sentence encoder, calibrate it, fine-tune it, and see what survives at each stage.

Calibration and fine-tuning see the sentences of the training set and no score; sentences that the dev set uses too are
left out. The halves of dev are reported apart: choices that were made on one half can be checked on the other.
Every stage of every variant is a cell of its own and leaves its model behind, so an interrupted run goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from lotformer import conversion
from lotformer.cli.tables import Table
from lotformer.cli.terminal import Listener
from lotformer.data import glue
from lotformer.data.checkpoints import save_like
from lotformer.data.folder import data_folder
from lotformer.data.sentence_pairs import PARTS, SentencePairs
from lotformer.data.text import text_batches
from lotformer.settings import Settings, setting

from ..results.cells import Origin, Record
from ..results.sources import checkpoint_source, files_source
from .engine import Cells, Experiment, Job, alike, described, names_among
from .every_length import convert_at_every_length
from .forms import AWARE, NEAR, TRANSPORT, WIDE
from .inputs import Encoder, GlueData, encoder_weights
from .unlabelled import Learned, learn

VARIANTS: dict[str, dict[str, Any]] = {
    "lot": TRANSPORT,
    "lot-uniform": {**TRANSPORT, "key_masses": "uniform"},
    "lot-keys": {**TRANSPORT, "balance": "keys"},
    "lot-none": {**TRANSPORT, "balance": "none"},
    "lot-aware": AWARE,
    "lot-aware-keys": {**AWARE, "balance": "keys"},
    "lot-aware-none": {**AWARE, "balance": "none"},
    "lot-near": NEAR,
    "lot-near-keys": {**NEAR, "balance": "keys"},
    "lot-near-none": {**NEAR, "balance": "none"},
    "lot-near-fixed": {**NEAR, "pivots": "fixed"},
    "lot-near-cls": {**NEAR, "prefix_tokens": 1},
    "lot-wide": WIDE,
}
"""Transport alone, with query-aware key masses, which attention sinks need, or uniform ones, which are strictly doubly
stochastic; with pivots that see the input; and with a softmax over the nearest tokens beside it, or also over the first
token. Both sides are balanced, as in the paper, or the keys alone, or nothing. `convert` makes `lot-wide`."""

_LATER = {"converted": ("calibration", "finetune"), "calibrated": ("finetune",), "fine-tuned": ()}
STAGES = tuple(_LATER)
"""Each depends on nothing that is said of later ones: more fine-tuning leaves what was calibrated as it is."""


@dataclass(frozen=True)
class StsbSettings(Settings):
    """The budget. Everything else is the library's default."""

    rank: int = setting(32, "Pivots per head.", at_least=1)
    calibration_texts: int = setting(2560, "Sentences to learn from.", at_least=1)
    calibration_steps: int = setting(250, "Steps of calibration.", at_least=1)
    finetune_steps: int = setting(200, "Steps of fine-tuning without labels; 0 for none.", at_least=0)
    finetune_lr: float = setting(5e-5, "Learning rate of the original weights during that.", at_least=0)
    finetune_layers: float = setting(0.0, "Weight of the loss on hidden states during fine-tuning.", at_least=0)
    batch_size: int = setting(32, "Sentences per step.", at_least=1)
    max_length: int = setting(128, "Longer sentences are cut to this many tokens.", at_least=8)
    seed: int = setting(0, "Random seed.")


@dataclass(frozen=True)
class Score:
    """One part of the dev set. `cosine` is the mean between converted and original embeddings of its sentences."""

    pairs: int
    softmax: float
    spearman: float
    recovered: float
    cosine: float


@dataclass(frozen=True)
class Cell:
    """One variant at one stage. `seconds` is of this stage, None if it was interrupted on the way.

    Couplings are looked at in every fourth batch of dev, short and long sentences alike.
    """

    variant: str
    stage: str
    scores: dict[str, Score]
    residual_mean: float
    residual_max: float
    doubly_stochastic_mean: float
    doubly_stochastic_max: float
    seconds: float | None


def plan(
    settings: StsbSettings,
    listen: Listener,
    checkpoint: Encoder = None,
    data_dir: GlueData = None,
    variants: Annotated[
        str | None, typer.Option(help=f"Variants of LOT, comma-separated; by default all: {', '.join(VARIANTS)}.")
    ] = None,
) -> Iterator[Job]:
    """A job for the stages of every variant, of those that are not asked for too: all share the table."""
    data, asked, task = data_folder(data_dir, glue.WANTED), names_among(variants, VARIANTS), glue.TASKS["stsb"]
    weights = encoder_weights(checkpoint)
    texts = files_source(f"glue/{task.folder}", glue.files(task, data))
    whole = Origin(described(settings), {"checkpoint": checkpoint_source(weights), "data": texts})
    stages = STAGES if settings.finetune_steps else STAGES[:-1]
    bench = cache(partial(_Bench, weights, data, settings, listen))

    def fill(name: str, cells: Cells) -> None:
        bench().fill(name, stages, cells)

    for name in dict.fromkeys([*asked, *VARIANTS]):
        origins = {f"{name}/{stage}": whole.without(*_LATER[stage]) for stage in stages}
        yield Job(origins, partial(fill, name), settings.seed, name in asked)


def _arranged(records: list[Record]) -> list[Record]:
    variants = list(VARIANTS)
    return sorted(records, key=lambda r: (variants.index(r.cell.variant), STAGES.index(r.cell.stage)))


def _tables(records: list[Record]) -> list[Table]:
    """A row for each variant and stage: Spearman, percent recovered and embedding cosine on the parts of dev."""
    cells: list[Cell] = [record.cell for record in records]
    softmax = cells[0].scores
    titles = [f"{part}\n({softmax[part].pairs} pairs)" for part in PARTS]
    columns = ("variant, stage", *titles, "residual,\nmean; max", "d.s. error,\nmean; max", "seconds")
    rows = [("softmax", *(f"{softmax[part].softmax:.4f}" for part in PARTS), "–", "–", "–")]
    for cell in cells:
        scores = [
            f"{score.spearman:.4f}; {score.recovered:.2f} %; {score.cosine:.4f}"
            for score in (cell.scores[part] for part in PARTS)
        ]
        residual = f"{cell.residual_mean:.0e}; {cell.residual_max:.0e}"
        error = f"{cell.doubly_stochastic_mean:.2g}; {cell.doubly_stochastic_max:.2g}"
        seconds = "–" if cell.seconds is None else f"{cell.seconds:.0f}"
        rows.append((f"{cell.variant}, {cell.stage}", *scores, residual, error, seconds))
    return [Table("Spearman; % of softmax recovered; cosine with the original's embeddings", columns, tuple(rows))]


def _notes(records: list[Record]) -> list[str]:
    return [
        f"{', '.join(f'{one.cell.variant} {one.cell.stage}' for one in made)}: {text}."
        for text, made in alike(records, budget).items()
    ]


def calibration_texts(train: Sequence[glue.Example], dev: Sequence[glue.Example], count: int) -> list[str]:
    """At most `count` different sentences of the training set, evenly spread over it, none of them in the dev set."""
    kept_back = {text for example in dev for text in example.texts}
    texts = list(dict.fromkeys(text for example in train for text in example.texts if text not in kept_back))
    if not texts:
        raise ValueError(
            "the training set holds no sentence that the dev set does not hold too: nothing to learn from."
        )
    count = min(count, len(texts))
    return [texts[i * len(texts) // count] for i in range(count)]


class _Bench:
    """The original model, what it makes of the dev set, and the texts to learn from."""

    def __init__(self, checkpoint: Path, data: Path, settings: StsbSettings, listen: Listener) -> None:
        from transformers import AutoModel, AutoTokenizer

        task = glue.TASKS["stsb"]
        train, dev = (glue.load(task, split, data) for split in ("train", "dev"))
        if len(dev) < 4:
            raise ValueError(f"the dev set of STS-B has {len(dev)} pairs: too few to rank in two halves.")
        self.checkpoint, self.settings, self.listen = checkpoint, settings, listen
        self.load: Callable[[str | Path], Any] = lambda source: AutoModel.from_pretrained(str(source)).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(str(checkpoint))
        self.original = self.load(checkpoint)
        self.pairs = SentencePairs(dev)
        listen("softmax: scoring", 0, 1)
        self.reference = self.pairs.embed(self.original, self.tokenizer, max_length=settings.max_length)
        self.texts = calibration_texts(train, dev, settings.calibration_texts)
        self.train, self.dev = (
            text_batches(self.tokenizer, texts, batch_size=settings.batch_size, max_length=settings.max_length)
            for texts in (self.texts, self.pairs.texts)
        )

    def fill(self, variant: str, stages: Sequence[str], cells: Cells) -> None:
        """Go through the stages; a finished one only hands its model on."""
        torch.manual_seed(self.settings.seed)
        start = time.perf_counter()
        model = self.load(self.checkpoint)
        convert_at_every_length(model, "lot", rank=self.settings.rank, **VARIANTS[variant])
        seconds = time.perf_counter() - start
        for stage in stages:
            name = f"{variant}/{stage}"
            if cells.find(name) is not None:
                model = model if stage == "converted" else self.load(cells.place(name))
                continue
            progress = cells.begin(name)
            spent = Learned(seconds=seconds)
            if stage != "converted":
                spent = learn(
                    stage,
                    model,
                    self.train,
                    lambda: self.original,
                    self.settings,
                    seed=self.settings.seed,
                    checkpoint=progress,
                    told=(variant, self.listen),
                )
                save_like(self.checkpoint, model, cells.place(name))
            self.listen(f"{variant}: scoring, {stage}", 0, 1)
            cost = {"steps": spent.steps, "texts": len(self.texts) if spent.steps else 0}
            cells.finish(name, self._measured(model, variant, stage, spent.seconds), cost)

    def _measured(self, model: nn.Module, variant: str, stage: str, seconds: float | None) -> Cell:
        quality = conversion.coupling_quality(model, self.dev[::4])
        assert quality is not None
        assert quality.residual_mean is not None
        assert quality.residual_max is not None
        embeddings = self.pairs.embed(model, self.tokenizer, max_length=self.settings.max_length)
        return Cell(
            variant=variant,
            stage=stage,
            scores={name: self._score(embeddings, part) for name, part in self.pairs.parts().items()},
            residual_mean=quality.residual_mean,
            residual_max=quality.residual_max,
            doubly_stochastic_mean=quality.doubly_stochastic_mean,
            doubly_stochastic_max=quality.doubly_stochastic_max,
            seconds=seconds,
        )

    def _score(self, embeddings: Tensor, part: slice) -> Score:
        softmax, now = (self.pairs.spearman(e, part) for e in (self.reference, embeddings))
        return Score(
            pairs=len(self.pairs.labels[part]),
            softmax=softmax,
            spearman=now,
            recovered=100 * now / softmax,
            cosine=float((embeddings[part] * self.reference[part]).sum(-1).mean()),
        )


def budget(record: Record, seeds: str = "") -> str:
    """Budget and machine of a cell; `seeds` is said in place of its own where several share the line."""
    s, spent = record.origin.settings, record.provenance.budget
    seeds = seeds or f"seed {s['seed']}"
    checkpoint = record.origin.sources.get("checkpoint")
    parts = [f"{checkpoint.name}, rank {s['rank']}" if checkpoint else f"rank {s['rank']}"]
    if spent.get("steps"):
        parts.append(f"{spent['steps']} steps on {spent['texts']} texts without labels")
    if "finetune_lr" in s:
        parts.append(f"lr {s['finetune_lr']:g}, layers weighed {s['finetune_layers']:g}")
    parts.append(f"batch {s['batch_size']}, {s['max_length']} tokens, {seeds}")
    return "; ".join([*parts, record.provenance.where()])


EXPERIMENT = Experiment(
    name="stsb",
    about="STS-B: what survives of a sentence encoder when its attention is converted, calibrated and fine-tuned.",
    settings=StsbSettings,
    cell=Cell,
    plan=plan,
    arranged=_arranged,
    tables=_tables,
    notes=_notes,
)
