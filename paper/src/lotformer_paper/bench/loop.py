"""Overhead of the training loop: its steps and bare ones of the same model on the same images, in turns."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lotformer.cli.tables import Table
from lotformer.settings import setting
from lotformer.training.decay import parameter_groups
from lotformer.training.loader import LoaderStream, shuffled
from lotformer.training.logs import Progress
from lotformer.training.run import train
from lotformer.training.settings import TrainSettings
from lotformer.training.task import Sums
from lotformer.training.teams import Process

from ..results.plain import read
from ..results.provenance import Provenance
from ..results.report import Report
from .settings import BenchSettings

NAME = "loop"


@dataclass(frozen=True)
class LoopBenchSettings(BenchSettings):
    """The model, and how many steps to compare."""

    model: str = setting("lot_deit_tiny_patch16_224", "A model of lotformer.models.")
    depth: int = setting(12, "Its blocks.", at_least=1)
    size: int = setting(224, "Side of the images in pixels.", at_least=16)
    batch: int = setting(4, "Images per step.", at_least=1)
    steps: int = setting(40, "Steps of either kind; the first of each is not counted.", at_least=3)


@dataclass(frozen=True)
class LoopResult:
    """Seconds of every step, and the processor's share of them."""

    experiment: str
    provenance: Provenance
    settings: LoopBenchSettings
    bare: tuple[float, ...]
    loop: tuple[float, ...]
    bare_processor: tuple[float, ...]
    loop_processor: tuple[float, ...]


class _Images:
    """Random images in memory: loading them is a copy."""

    def __init__(self, settings: LoopBenchSettings) -> None:
        generator = torch.Generator().manual_seed(settings.seed)
        self.pixels = torch.randn(2 * settings.batch, 3, settings.size, settings.size, generator=generator)

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.pixels[index], 0


class _Task:
    name, metric, higher_is_better = "loop", "none", True

    def __init__(self, chosen: LoopBenchSettings) -> None:
        self.chosen = chosen
        self.settings = TrainSettings(steps=chosen.steps, batch_size=chosen.batch, save_every=10**9, seed=chosen.seed)

    def build_model(self) -> nn.Module:
        from lotformer import models  # noqa: F401  registers ours

        # isort: split
        import timm

        return timm.create_model(self.chosen.model, depth=self.chosen.depth, img_size=self.chosen.size)

    def stream(self, process: Process) -> LoaderStream:
        data = _Images(self.chosen)
        return LoaderStream(data, shuffled(len(data), self.chosen.batch, 0), seed=0, process=process, described="noise")

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module, process: Process) -> Sums:
        return {"none": (0.0, 1.0)}


class _Turns:
    """Takes a bare step after every step of the loop; the loop's time is what passes in between, all it does in it."""

    def __init__(self, bare: Callable[[], None]) -> None:
        self.bare = bare
        self.bare_times: list[tuple[float, float]] = []
        self.loop_times: list[tuple[float, float]] = []
        self._left = _now()

    def started(self, step: int, steps: int) -> None: ...

    def stepped(self, progress: Progress) -> None:
        arrived = _now()
        self.loop_times.append((arrived[0] - self._left[0], arrived[1] - self._left[1]))
        self.bare()
        self._left = _now()
        self.bare_times.append((self._left[0] - arrived[0], self._left[1] - arrived[1]))

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def ended(self) -> None: ...


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def run(
    settings: LoopBenchSettings, provenance: Provenance, listen: Callable[[str], None] = lambda what: None
) -> LoopResult:
    """Train with the loop, and take a bare step of a twin after every step of it."""
    task = _Task(settings)
    turns = _Turns(_bare_step(task))
    listen(f"{settings.steps} steps of {settings.model}, bare and in the loop")
    with tempfile.TemporaryDirectory() as folder:
        train(task, Path(folder), listeners=[turns])
    bare, loop = turns.bare_times[1:], turns.loop_times[1:]
    return LoopResult(
        NAME,
        provenance,
        settings,
        tuple(wall for wall, _ in bare),
        tuple(wall for wall, _ in loop),
        tuple(processor for _, processor in bare),
        tuple(processor for _, processor in loop),
    )


def _bare_step(task: _Task) -> Callable[[], None]:
    """Forward, backward, clipping and AdamW as a script would write them."""
    torch.manual_seed(task.chosen.seed)
    model, s = task.build_model().train(), task.settings
    optimizer = torch.optim.AdamW(parameter_groups(model, s.weight_decay), lr=s.lr)
    pixels, labels = _Images(task.chosen).pixels[: task.chosen.batch], torch.zeros(task.chosen.batch, dtype=torch.long)

    def step() -> None:
        F.cross_entropy(model(pixels), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), s.clip_norm or 0.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def render(folder: Path) -> Report:
    result = read(LoopResult, folder / "result.json")
    kinds = {
        "wall clock": (result.bare, result.loop),
        "processor": (result.bare_processor, result.loop_processor),
    }
    rows = []
    for kind, (bare, loop) in kinds.items():
        for name, of in (("best", min), ("median", statistics.median)):
            ours, theirs = of(loop), of(bare)
            added = f"{100 * (ours / theirs - 1):+.1f} %"
            rows.append((f"{kind}, {name}", f"{1e3 * theirs:.1f}", f"{1e3 * ours:.1f}", added))
    s = result.settings
    notes = (
        f"{s.model} with {s.depth} blocks at {s.size} px, batch {s.batch}; {len(result.loop)} steps of either kind in "
        "turns. The loop's are all that it does between two steps: loading, logs, progress, timing of attention, "
        "and looking for signals.",
        f"{result.provenance.where()}.",
    )
    columns = ("a training step", "bare, ms", "in the loop, ms", "added")
    return Report((result.provenance.command,), (Table("", columns, tuple(rows)),), notes)
