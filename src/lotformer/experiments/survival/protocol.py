"""The protocol that all modalities share: convert, calibrate, keep some layers, fine-tune without labels; score each.

Every stage of every variant is a cell of its own and leaves its model behind, so an interrupted run goes on.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ... import conversion
from ..._files import require_writable
from ..._settings import Settings, setting
from ...data.batches import Batch
from ...results.cells import CellFolder, Listener, Origin, Record
from ...results.report import Report
from ...results.tables import Table

VARIANTS: dict[str, dict[str, Any]] = {
    "lot-32": {"rank": 32},
    "lot-64": {"rank": 64},
    "lot-128": {"rank": 128},
    "lot-fixed": {"rank": 32, "pivots": "fixed"},
    "lot-keys": {"rank": 32, "balance": "keys"},
    "lot-window-3": {"rank": 32, "window_size": 3},
    "lot-transport-alone": {"rank": 32, "window": None, "prefix_tokens": 0},
    "lot-uniform": {"rank": 32, "key_masses": "uniform", "window": None, "prefix_tokens": 0},
}
"""What is asked of `convert` beside its defaults. The last one is strictly doubly stochastic, the one before it is what
no window helps."""

OTHERS: dict[str, dict[str, Any]] = {"sinkformer": {}, "espformer": {}}
"""Other mechanisms under the same protocol. They have no parameters of their own: there is nothing to calibrate."""


@dataclass(frozen=True)
class ProtocolSettings(Settings):
    """How much is spent. What is not here is as in the library."""

    calibration_inputs: int = setting(256, "Unlabelled inputs to learn from.", at_least=2)
    calibration_steps: int = setting(150, "Steps of calibration.", at_least=1)
    kept: tuple[int, ...] = setting((), "Numbers of layers to give softmax back to after calibration.")
    finetune_steps: int = setting(0, "Steps of fine-tuning without labels; 0 for none.", at_least=0)
    finetune_lr: float = setting(5e-5, "Learning rate of the original weights during that.", at_least=0)
    finetune_layers: float = setting(1.0, "Weight of the loss on hidden states during fine-tuning.", at_least=0)
    batch_size: int = setting(8, "Inputs per step.", at_least=1)
    seed: int = setting(0, "Random seed.")


class Task(Protocol):
    """A checkpoint with what it learns from and what it is judged by."""

    def load(self, place: Path | None = None) -> Any:
        """The original, or the converted model that `save` has written to `place`."""

    def save(self, model: Any, place: Path) -> None: ...

    def body(self, model: Any) -> nn.Module:
        """The part that is converted and taught."""

    def batches(self) -> Sequence[Batch]:
        """Unlabelled inputs of the body; none of them is scored."""

    def test_batches(self) -> Sequence[Batch]:
        """Some of the inputs that are scored, to look at couplings."""

    def scores(self, model: Any, listen: Listener) -> dict[str, float]:
        """What counts, the most important first; the original comes first and is what others are compared with."""


@dataclass(frozen=True)
class Cell:
    """One variant at one stage. `seconds` is of this stage, None if it was interrupted on the way.

    `errors` are the relative output errors of the layers after calibration, `forecast` the cosine it expected.
    """

    variant: str
    stage: str
    scores: dict[str, float]
    softmax: dict[str, float]
    residual_max: float | None
    doubly_stochastic_mean: float | None
    errors: dict[str, float]
    forecast: float | None
    seconds: float | None


@dataclass(frozen=True)
class Experiment:
    """A task with its name, for `lotformer render`, and the scores that are percentages of the original's."""

    name: str
    title: str
    relative: tuple[str, ...]

    def run(
        self,
        task: Task,
        out: Path,
        variants: Sequence[str],
        settings: ProtocolSettings,
        sources: Mapping[str, Any],
        listen: Listener = lambda what, now, total: None,
        command: str = "",
    ) -> list[Cell]:
        """Fill every stage of every variant that is not in `out` yet; returns all of them.

        Raises:
            ValueError: a variant is unknown, or `out` holds cells made from something else.
        """
        for name in variants:
            if name not in VARIANTS | OTHERS:
                raise ValueError(f"{name!r} is not one of {', '.join(VARIANTS | OTHERS)}.")
        bench = _Bench(task, settings, listen)
        cells = []
        for name in variants:
            folder = CellFolder(out / name, Cell, self.name, command)
            whole = Origin({**dataclasses.asdict(settings), "options": _options(name)}, dict(sources))
            stages = _stages(name, settings)
            origins = {stage: _origin_of(stage, whole) for stage in stages}
            if any(folder.find(stage, origins[stage]) is None for stage in stages):
                require_writable(out / name)
                bench.fill(name, folder, stages, origins)
            cells += [cell for stage in stages if (cell := folder.find(stage, origins[stage])) is not None]
        return cells

    def render(self, folder: Path) -> Report:
        """The table of every cell in the folder, and below it what was spent on them."""
        found: list[Record] = []
        for name in VARIANTS | OTHERS:
            place = CellFolder(folder / name, Cell, self.name)
            stages = sorted((path.stem for path in (folder / name).glob("*.json")), key=_order)
            found += [record for stage in stages if (record := place.record(stage)) is not None]
        if not found:
            raise ValueError(f"{folder} holds no finished cell.")
        budgets: dict[str, list[str]] = {}
        for record in found:
            budgets.setdefault(_budget(record), []).append(f"{record.cell.variant} {record.cell.stage}")
        notes = [f"{', '.join(places)}: {text}." for text, places in budgets.items()]
        notes += [_errors(record.cell) for record in found if record.cell.stage == "calibrated"]
        commands = tuple(dict.fromkeys(record.provenance.command for record in found))
        return Report(commands, (self.table([record.cell for record in found]),), tuple(notes))

    def table(self, cells: Sequence[Cell]) -> Table:
        """A row for each variant and stage; scores that can be are followed by what they are of softmax's."""
        names = list(cells[0].softmax)
        columns = ("variant, stage", *names, "residual,\nmax", "d.s. error,\nmean", "cosine\nexpected", "seconds")
        rows = [("softmax", *(f"{cells[0].softmax[name]:.4f}" for name in names), "–", "–", "–", "–")]
        for cell in cells:
            values = [
                f"{cell.scores[name]:.4f}"
                + (f" ({100 * cell.scores[name] / cell.softmax[name]:.1f} %)" if name in self.relative else "")
                for name in names
            ]
            residual = "–" if cell.residual_max is None else f"{cell.residual_max:.0e}"
            error = "–" if cell.doubly_stochastic_mean is None else f"{cell.doubly_stochastic_mean:.2g}"
            expected = "–" if cell.forecast is None else f"{cell.forecast:.3f}"
            seconds = "–" if cell.seconds is None else f"{cell.seconds:.0f}"
            rows.append((f"{cell.variant}, {cell.stage}", *values, residual, error, expected, seconds))
        return Table(self.title, columns, tuple(rows))


class _Bench:
    """The task, its original's scores, and the stages."""

    def __init__(self, task: Task, settings: ProtocolSettings, listen: Listener) -> None:
        self.task, self.settings, self.listen = task, settings, listen
        self.softmax: dict[str, float] | None = None

    def fill(self, variant: str, cells: CellFolder[Cell], stages: Sequence[str], origins: Mapping[str, Origin]) -> None:
        """Go through the stages; a finished one only hands its model on."""
        if self.softmax is None:
            self.listen("softmax: scoring", 0, 1)
            self.softmax = self.task.scores(self.task.load().eval(), self.listen)
        torch.manual_seed(self.settings.seed)
        begun = time.perf_counter()
        model = self.task.load().eval()
        conversion.convert(self.task.body(model), variant if variant in OTHERS else "lot", **_options(variant))
        spent: float | None = time.perf_counter() - begun
        last: Cell | None = None
        for stage in stages:
            place = cells.folder / stage
            done = cells.find(stage, origins[stage])
            if done is not None:
                if stage == "calibrated":
                    model, last = self.task.load(place).eval(), done
                continue
            progress = cells.begin(stage, origins[stage])
            errors, forecast, steps = (last.errors if last else {}), None, 0
            current = model
            if stage == "calibrated":
                resumed, report = progress.exists(), self._calibrate(variant, model, progress)
                errors, steps, spent = report.error_after, report.steps, None if resumed else report.seconds
                forecast = None if report.forecast is None else report.forecast.cosine
                self.task.save(model, place)
            elif stage.startswith("kept"):
                current, spent = self.task.load(cells.folder / "calibrated").eval(), 0.0
                worst = sorted(errors, key=errors.__getitem__, reverse=True)[: int(stage.rpartition("-")[2])]
                conversion.revert(self.task.body(current), layers=worst)
            elif stage == "fine-tuned":
                resumed, tuned = progress.exists(), self._finetune(variant, model, progress)
                steps, spent = tuned.steps, None if resumed else tuned.seconds
                self.task.save(model, place)
            cell = self._measured(current, variant, stage, errors, forecast, spent)
            last = cell if stage == "calibrated" else last
            budget = {"steps": steps, "inputs": self.settings.calibration_inputs if steps else 0}
            cells.finish(stage, cell, origins[stage], budget, self.settings.seed)

    def _calibrate(self, variant: str, model: Any, progress: Path) -> conversion.CalibrationReport:
        return conversion.calibrate(
            self.task.body(model),
            self.task.batches(),
            steps=self.settings.calibration_steps,
            seed=self.settings.seed,
            checkpoint=progress,
            on_step=lambda now, total, _: self.listen(f"{variant}: calibrating", now, total),
        )

    def _finetune(self, variant: str, model: Any, progress: Path) -> conversion.FinetuningReport:
        return conversion.finetune(
            self.task.body(model),
            self.task.batches(),
            teacher=self.task.body(self.task.load()).eval(),
            steps=self.settings.finetune_steps,
            lr=self.settings.finetune_lr,
            layer_weight=self.settings.finetune_layers,
            seed=self.settings.seed,
            checkpoint=progress,
            on_step=lambda now, total, _: self.listen(f"{variant}: fine-tuning without labels", now, total),
        )

    def _measured(
        self,
        model: Any,
        variant: str,
        stage: str,
        errors: dict[str, float],
        forecast: float | None,
        seconds: float | None,
    ) -> Cell:
        assert self.softmax is not None
        body = self.task.body(model.eval())
        quality = conversion.coupling_quality(body, self.task.test_batches())
        return Cell(
            variant=variant,
            stage=stage,
            scores=self.task.scores(model, lambda what, now, total: self.listen(f"{variant}: {what}", now, total)),
            softmax=self.softmax,
            residual_max=None if quality is None else quality.residual_max,
            doubly_stochastic_mean=None if quality is None else quality.doubly_stochastic_mean,
            errors=errors,
            forecast=forecast,
            seconds=seconds,
        )


def _options(variant: str) -> dict[str, Any]:
    return (VARIANTS | OTHERS)[variant]


def _stages(variant: str, settings: ProtocolSettings) -> list[str]:
    learned = ["calibrated", *(f"kept-{count}" for count in settings.kept)] if variant in VARIANTS else []
    return ["converted", *learned, *(["fine-tuned"] if settings.finetune_steps else [])]


def _order(stage: str) -> tuple[int, int]:
    """Stages as they follow each other; more layers kept come later."""
    kind, _, count = stage.partition("-")
    return ("converted", "calibrated", "kept", "fine").index(kind), int(count) if count.isdigit() else 0


def _origin_of(stage: str, whole: Origin) -> Origin:
    """What a stage depends on: more fine-tuning leaves what was calibrated as it is."""
    later: tuple[str, ...] = {"converted": ("calibration", "finetune"), "fine-tuned": ()}.get(stage, ("finetune",))
    settings = {name: value for name, value in whole.settings.items() if not name.startswith((*later, "kept"))}
    return Origin(settings, whole.sources)


def _budget(record: Record) -> str:
    settings, budget = record.origin.settings, record.provenance.budget
    parts = [source.name for source in record.origin.sources.values()]
    if budget.get("steps"):
        parts.append(f"{budget['steps']} steps of {settings['batch_size']} on {budget['inputs']} unlabelled inputs")
    if "finetune_lr" in settings:
        parts.append(f"lr {settings['finetune_lr']:g}, layers weighed {settings['finetune_layers']:g}")
    known = {field.name for field in dataclasses.fields(ProtocolSettings)} | {"options"}
    parts += [f"{name.replace('_', ' ')} {value}" for name, value in settings.items() if name not in known]
    return "; ".join([*parts, f"seed {settings['seed']}", record.provenance.where()])


def _errors(cell: Cell) -> str:
    mean = sum(cell.errors.values()) / len(cell.errors)
    each = ", ".join(f"{error:.3f}" for error in cell.errors.values())
    return f"{cell.variant}: relative output error of a layer {mean:.3f}; by depth {each}."
