"""The protocol that all modalities share: convert, calibrate, keep some layers, fine-tune without labels; score each.

Every stage of every variant and seed is a cell of its own and leaves its model behind, so an interrupted run goes on.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from lotformer import conversion
from lotformer.cli.tables import Table, mean_and_deviation
from lotformer.cli.terminal import Listener
from lotformer.conversion.defaults import WINDOW_SIZES
from lotformer.conversion.recipe import TokenKind
from lotformer.data.batches import Batch
from lotformer.files import new_file
from lotformer.reading import decoding
from lotformer.settings import Settings, setting

from ...results.cells import Origin, Record
from ...results.report import largest
from ...results.sources import Source
from ..engine import Cells, Experiment, Job, alike, described, names_among
from ..every_length import convert_at_every_length
from ..unlabelled import Learned, learn

VARIANTS: dict[str, dict[str, Any]] = {
    "lot-32": {"rank": 32},
    "lot-64": {"rank": 64},
    "lot-128": {"rank": 128},
    "lot-fixed": {"rank": 32, "pivots": "fixed"},
    "lot-both": {"rank": 32, "balance": "both"},
    **{f"lot-window-{size}": {"rank": 32, "window_size": size} for size in (3, 5, 9, 13, 33)},
    "lot-transport-alone": {"rank": 32, "window": None, "prefix_tokens": 0},
    "lot-uniform": {"rank": 32, "key_masses": "uniform", "window": None, "prefix_tokens": 0},
}
"""Options of `convert` beside its defaults. The last one is strictly doubly stochastic, the one before it is what
no window helps."""

EVERYTHING = 1 << 20
"""The value of a setting without a limit."""

_LEARNING = ("calibration", "finetune", "learned", "batch_size")
"""Prefixes of settings that matter only once something is learned."""

_ORIGINAL = "softmax"

OTHERS: dict[str, dict[str, Any]] = {"sinkformer": {}, "espformer": {}}
"""Other mechanisms under the same protocol. They have no parameters of their own: there is nothing to calibrate."""


@dataclass(frozen=True)
class ProtocolSettings(Settings):
    """The budget. Everything else is the library's default."""

    calibration_inputs: int = setting(256, "Unlabelled inputs to learn from.", at_least=2)
    calibration_steps: int = setting(150, "Steps of calibration.", at_least=1)
    first_stage: Literal["converted", "calibrated"] = setting("converted", "First stage that is scored.")
    kept: tuple[int, ...] = setting((), "Numbers of layers to give softmax back to after calibration.", at_least=1)
    finetune_steps: int = setting(0, "Steps of fine-tuning without labels; 0 for none.", at_least=0)
    finetune_inputs: int = setting(0, "Unlabelled inputs for that; 0 for those of calibration.", at_least=0)
    finetune_lr: float = setting(5e-5, "Learning rate of the original weights during that.", at_least=0)
    finetune_mechanism_lr: float = setting(5e-3, "Learning rate of the mechanisms during that.", at_least=0)
    finetune_precision: Literal["fp32", "bf16"] = setting("fp32", "Precision of products during that.")
    finetune_layers: float = setting(1.0, "Weight of the loss on hidden states during fine-tuning.", at_least=0)
    batch_size: int = setting(8, "Inputs per step.", at_least=1)
    scored_in: Literal["fp32", "bf16"] = setting("fp32", "Precision of products while scoring, for softmax too.")
    seeds: tuple[int, ...] = setting((0,), "Random seeds, each with cells of its own.", at_least=0)

    def products(self) -> torch.autocast:
        """Around models that run to be scored; sums and products that scores are made of stay outside."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self.scored_in == "bf16")


class Task(Protocol):
    """A checkpoint with what it learns from and what it is judged by.

    Attributes:
        tokens: what the model reads. reference: outputs of the original that others are compared with, once it has
            been scored.
    """

    tokens: TokenKind
    reference: Tensor | None

    def load(self, place: Path | None = None) -> Any:
        """The original, or the converted model that `save` has written to `place`."""

    def save(self, model: Any, place: Path) -> None: ...

    def body(self, model: Any) -> nn.Module:
        """The part that is converted and taught."""

    def batches(self, count: int) -> Sequence[Batch]:
        """At most so many unlabelled inputs of the body; none of them is scored."""

    def test_batches(self) -> Sequence[Batch]:
        """Some of the inputs that are scored, to look at couplings."""

    def scores(self, model: Any, listen: Listener) -> dict[str, float]:
        """Scores, the most important first. Without a reference, the model is the original and becomes it."""


@dataclass(frozen=True)
class Cell:
    """One variant with one seed at one stage. `seconds` is of this stage, None if it was interrupted on the way.

    `errors` are the relative output errors of the layers after calibration, `forecast` the cosine it expected.
    """

    variant: str
    stage: str
    seed: int
    scores: dict[str, float]
    softmax: dict[str, float]
    residual_max: float | None
    doubly_stochastic_mean: float | None
    errors: dict[str, float]
    forecast: float | None
    seconds: float | None


@dataclass(frozen=True)
class Softmax:
    """The original, as it was scored."""

    scores: dict[str, float]


def survival(
    name: str,
    about: str,
    settings: type[ProtocolSettings],
    plan: Callable[..., Iterable[Job]],
    title: str,
    relative: Collection[str],
    require: Callable[[], None] = lambda: None,
) -> Experiment:
    """The experiment on one modality; `relative` names the scores that are shown in percent of the original's, too."""
    return Experiment(
        name=name,
        about=about,
        settings=settings,
        cell=Softmax | Cell,
        plan=plan,
        arranged=lambda found: sorted((r for r in found if isinstance(r.cell, Cell)), key=lambda r: _order(r.cell)),
        tables=lambda records: [_table(title, relative, records)],
        notes=_notes,
        require=require,
    )


def jobs(
    task: Task, sources: Mapping[str, Source], settings: ProtocolSettings, variants: str, listen: Listener
) -> Iterator[Job]:
    """A job for the stages of every seed and variant. The original is scored by the first that needs it."""
    bench = _Bench(task, settings, listen)
    whole = Origin(described(settings, "seeds", "kept", "first_stage"), dict(sources))  # these only say which cells
    yield Job({_ORIGINAL: whole.without(*_LEARNING)}, asked=False)
    for seed, name in itertools.product(settings.seeds, names_among(variants, VARIANTS | OTHERS)):
        about = Origin({**whole.settings, "seed": seed, "options": _in_full(name, task.tokens)}, whole.sources)
        stages = _stages(name, settings)
        origins = {_place(name, seed, stage): about.without(*_later(stage)) for stage in stages}
        yield Job(origins, partial(bench.fill, name, seed, stages), seed)


def _place(variant: str, seed: int, stage: str) -> str:
    return f"{variant}/seed{seed}/{stage}"


def _table(title: str, relative: Collection[str], records: Sequence[Record]) -> Table:
    """A row for each variant and stage, the mean over seeds with one budget; scores that can be in percent, too."""
    softmax: dict[str, float] = records[0].cell.softmax
    names = list(softmax)
    columns = ("variant, stage", *names, "residual,\nmax", "d.s. error,\nmean", "cosine\nexpected", "seconds")
    rows = [("softmax", *(f"{softmax[name]:.4f}" for name in names), "–", "–", "–", "–")]
    for made in alike(records, _row).values():
        seeds: list[Cell] = [record.cell for record in made]
        errors = [cell.doubly_stochastic_mean for cell in seeds if cell.doubly_stochastic_mean is not None]
        rows.append(
            (
                f"{seeds[0].variant}, {seeds[0].stage}",
                *(_score(name, seeds, name in relative) for name in names),
                largest(cell.residual_max for cell in seeds),
                f"{sum(errors) / len(errors):.2g}" if errors else "–",
                mean_and_deviation([cell.forecast for cell in seeds if cell.forecast is not None], digits=3),
                mean_and_deviation([cell.seconds for cell in seeds if cell.seconds is not None], digits=0),
            )
        )
    return Table(title, columns, tuple(rows))


def _row(record: Record) -> str:
    settings = {name: value for name, value in record.origin.settings.items() if name != "seed"}
    return f"{record.cell.variant}, {record.cell.stage}, {settings}"


def _score(name: str, seeds: Sequence[Cell], relative: bool) -> str:
    shown = mean_and_deviation([cell.scores[name] for cell in seeds], digits=4)
    if not relative:
        return shown
    return f"{shown} ({mean_and_deviation([100 * cell.scores[name] / cell.softmax[name] for cell in seeds])} %)"


def _notes(records: Sequence[Record]) -> list[str]:
    budgets = [f"{_with_seeds(made)}: {text}." for text, made in alike(records, _budget).items()]
    return [*budgets, *(_errors(record.cell) for record in records if record.cell.stage == "calibrated")]


class _Bench:
    """The task, its original's scores, and the stages."""

    def __init__(self, task: Task, settings: ProtocolSettings, listen: Listener) -> None:
        self.task, self.settings, self.listen = task, settings, listen
        self.softmax: dict[str, float] = {}

    def fill(self, variant: str, seed: int, stages: Sequence[str], cells: Cells) -> None:
        """Go through the stages; a finished one only hands its model on."""
        self._remember_the_original(cells)
        torch.manual_seed(seed)
        begun = time.perf_counter()
        model = self.task.load().eval()
        body = self.task.body(model)
        layers = convert_at_every_length(body, variant if variant in OTHERS else "lot", **_options(variant)).converted
        if "calibrated" in stages and max(self.settings.kept, default=0) >= len(layers):
            raise ValueError(
                f"kept must leave layers converted: the model has {len(layers)}, got {self.settings.kept}."
            )
        seconds, errors = time.perf_counter() - begun, dict[str, float]()
        for stage in stages:
            name = _place(variant, seed, stage)
            place, done = cells.place(name), cells.find(name)
            if done is not None:
                if stage == "calibrated":
                    model, errors = self.task.load(place).eval(), done.errors
                continue
            progress, inputs = cells.begin(name), 0
            current, spent = model, Learned(seconds=seconds)
            if stage.startswith("kept"):
                current, spent = (
                    self.task.load(cells.place(_place(variant, seed, "calibrated"))).eval(),
                    Learned(0, 0.0),
                )
                worst = sorted(errors, key=errors.__getitem__, reverse=True)[: int(stage.rpartition("-")[2])]
                conversion.revert(self.task.body(current), layers=worst)
            elif stage != "converted":
                inputs = self._inputs(stage)
                spent = self._learn(stage, variant, seed, model, inputs, progress)
                errors = spent.errors or errors
                self.task.save(model, place)
            quality = conversion.coupling_quality(self.task.body(current.eval()), self.task.test_batches())
            cell = Cell(
                variant=variant,
                stage=stage,
                seed=seed,
                scores=self._scores(current, variant),
                softmax=self.softmax,
                residual_max=None if quality is None else quality.residual_max,
                doubly_stochastic_mean=None if quality is None else quality.doubly_stochastic_mean,
                errors=errors,
                forecast=spent.forecast,
                seconds=spent.seconds,
            )
            cells.finish(name, cell, {"steps": spent.steps, "inputs": inputs})

    def _remember_the_original(self, cells: Cells) -> None:
        """Score it, unless that was done: by this run, or by one that has left its outputs in the folder."""
        if self.softmax:
            return
        found, kept = cells.find(_ORIGINAL), cells.place(f"{_ORIGINAL}.pt")
        if found is not None and kept.is_file():
            with decoding(kept, "what the original gave (delete it to make it again)"):
                self.task.reference = torch.load(kept, weights_only=True)
            self.softmax = found.scores
            return
        self.task.reference = None
        self.softmax = self._scores(self.task.load().eval(), _ORIGINAL)
        assert self.task.reference is not None
        with new_file(kept) as draft:
            torch.save(self.task.reference, draft)
        cells.finish(_ORIGINAL, Softmax(self.softmax))

    def _inputs(self, stage: str) -> int:
        """The number of inputs it learns from."""
        s = self.settings
        return s.calibration_inputs if stage == "calibrated" else s.finetune_inputs or s.calibration_inputs

    def _learn(self, stage: str, variant: str, seed: int, model: Any, inputs: int, progress: Path) -> Learned:
        return learn(
            stage,
            self.task.body(model),
            self.task.batches(inputs),
            lambda: self.task.body(self.task.load()).eval(),
            self.settings,
            seed=seed,
            checkpoint=progress,
            told=(variant, self.listen),
            mechanism_lr=self.settings.finetune_mechanism_lr,
            precision=self.settings.finetune_precision,
        )

    def _scores(self, model: Any, variant: str) -> dict[str, float]:
        return self.task.scores(model, lambda what, now, total: self.listen(f"{variant}: {what}", now, total))


def _options(variant: str) -> dict[str, Any]:
    return (VARIANTS | OTHERS)[variant]


def _in_full(variant: str, tokens: TokenKind) -> dict[str, Any]:
    """With the width of the window, which is a default: cells must not outlive it."""
    options = _options(variant)
    reads_neighbours = variant in VARIANTS and options.get("window", "default") is not None
    return {**options, "window_size": options.get("window_size", WINDOW_SIZES[tokens])} if reads_neighbours else options


def _stages(variant: str, settings: ProtocolSettings) -> list[str]:
    learned = ["calibrated", *(f"kept-{count}" for count in settings.kept)] if variant in VARIANTS else []
    taught = [*learned, *(["fine-tuned"] if settings.finetune_steps else [])]
    return taught if taught and settings.first_stage == "calibrated" else ["converted", *taught]


def _order(cell: Cell) -> tuple[int, int, int, int]:
    """Variants as they are listed, stages as they follow each other, more layers kept later; then seeds."""
    kind, _, count = cell.stage.partition("-")
    stage = ("converted", "calibrated", "kept", "fine").index(kind)
    return list(VARIANTS | OTHERS).index(cell.variant), stage, int(count) if count.isdigit() else 0, cell.seed


def _later(stage: str) -> tuple[str, ...]:
    """Prefixes of settings that a stage does not depend on: more fine-tuning leaves what was calibrated as it is."""
    return {"converted": _LEARNING, "fine-tuned": ()}.get(stage, ("finetune",))


def _budget(record: Record) -> str:
    settings, budget = record.origin.settings, record.provenance.budget
    parts = [source.name for source in record.origin.sources.values()]
    if budget.get("steps"):
        parts.append(f"{budget['steps']} steps of {settings['batch_size']} on {budget['inputs']} unlabelled inputs")
    if "finetune_lr" in settings:
        rates = f"lr {settings['finetune_lr']:g}, of mechanisms {settings['finetune_mechanism_lr']:g}"
        parts.append(f"{rates}, layers weighed {settings['finetune_layers']:g}")
    known = {field.name for field in dataclasses.fields(ProtocolSettings)} | {"options", "seed"}
    own = {name: value for name, value in settings.items() if name not in known and value not in (0, EVERYTHING)}
    parts += [f"{name.replace('_', ' ')} {value}" for name, value in own.items()]
    if settings.get("finetune_precision", "fp32") != "fp32":
        parts.append(f"learned in {settings['finetune_precision']}")
    if settings["scored_in"] != "fp32":
        parts.append(f"scored in {settings['scored_in']}")
    return "; ".join([*parts, record.provenance.where()])


def _with_seeds(records: Iterable[Record]) -> str:
    """`lot-32 calibrated (seeds 0, 1), lot-64 calibrated (seed 0)`."""
    places = alike(records, lambda record: f"{record.cell.variant} {record.cell.stage}")
    return ", ".join(
        f"{place} (seed{'s' * (len(made) > 1)} {', '.join(str(record.cell.seed) for record in made)})"
        for place, made in places.items()
    )


def _errors(cell: Cell) -> str:
    mean = sum(cell.errors.values()) / len(cell.errors)
    each = ", ".join(f"{error:.3f}" for error in cell.errors.values())
    return f"{cell.variant}, seed {cell.seed}: relative output error of a layer {mean:.3f}; by depth {each}."
