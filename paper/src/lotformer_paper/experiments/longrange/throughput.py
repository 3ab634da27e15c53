"""Training throughput of the arena's encoder: LOT against fused softmax, and where the time of an update goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from lotformer import attention
from lotformer.cli.tables import Table
from lotformer.cli.terminal import Listener
from lotformer.settings import Settings, setting

from ...results.cells import Origin, Record
from ...results.provenance import thread_count
from ..engine import Cells, Experiment, Job, described

_PARTS = {
    "attention": ("lotformer::", "scaled_dot_product", "flash_attention"),
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn"),
    "dropout": ("aten::random_", "aten::lt", "aten::bernoulli_", "dropout"),
    "norms": ("layer_norm",),
    "GELU": ("gelu",),
    "embedding": ("embedding", "aten::index"),
    "optimizer": ("Optimizer", "aten::_foreach", "aten::_fused_adamw_"),
}
"""Kinds of profiled operations, by name; the rest is additions, products, copies and sums."""


@dataclass(frozen=True)
class ThroughputSettings(Settings):
    """Mechanisms, lengths and time per measurement."""

    rows: tuple[str, ...] = setting(("lot", "softmax"), "Mechanisms; the others are compared with the last.")
    lengths: tuple[int, ...] = setting((1024, 2048, 4096, 16384), "Tokens per sequence.", at_least=1)
    tokens: int = setting(16384, "Tokens per update, at least one sequence.", at_least=1)
    repeats: int = setting(5, "Updates that are timed; the fastest counts.", at_least=1)
    rank: int = setting(32, "Pivots of LOT.", at_least=1)
    threads: int = setting(1, "Threads of PyTorch.", at_least=1)
    seed: int = setting(0, "Of weights and tokens.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for row in self.rows:
            attention.entry(row)


@dataclass(frozen=True)
class Cell:
    """One mechanism at one length. `processor_seconds` is the time that the process had the processor in the fastest
    update: where other work takes turns, that is the number to compare. `parts` are shares of a profiled update.
    """

    row: str
    length: int
    batch: int
    seconds: float
    processor_seconds: float
    parts: dict[str, float]

    @property
    def tokens_per_second(self) -> float:
        return self.batch * self.length / self.processor_seconds


def plan(settings: ThroughputSettings, listen: Listener) -> Iterator[Job]:
    """A job for every length."""
    for length in settings.lengths:
        origin = Origin({**described(settings), "lengths": [length]}, {})
        names = [f"{row}-{length}" for row in settings.rows]
        make = thread_count(settings.threads)(partial(_measured, settings, length, listen))
        yield Job(dict.fromkeys(names, origin), make, settings.seed)


def _measured(settings: ThroughputSettings, length: int, listen: Listener, cells: Cells) -> None:
    """Mechanisms take turns, update by update."""
    batch = max(1, settings.tokens // length)
    updates = {row: _update(settings, row, batch, length) for row in settings.rows}
    for update in updates.values():
        update()
    timed: dict[str, list[tuple[float, float]]] = {row: [] for row in updates}
    for repeat in range(settings.repeats):
        listen(f"{length} tokens", repeat, settings.repeats)
        for row, update in updates.items():
            wall, processor = time.perf_counter(), time.process_time()
            update()
            timed[row].append((time.process_time() - processor, time.perf_counter() - wall))
    for row, update in updates.items():
        cell = Cell(
            row, length, batch, seconds=min(wall for _, wall in timed[row]), processor_seconds=min(timed[row])[0],
            parts=_profiled(update),
        )  # fmt: skip
        cells.finish(f"{row}-{length}", cell, {"updates": settings.repeats})


def _update(settings: ThroughputSettings, row: str, batch: int, length: int) -> Callable[[], None]:
    """An update on random bytes: forward, backward, clipping, AdamW. Without attention dropout softmax is fused."""
    from ...models.longrange import LongRangeEncoder

    torch.manual_seed(settings.seed)
    model = LongRangeEncoder(
        vocabulary=256,
        max_length=length,
        classes=2,
        attention=row,
        attention_options={"rank": settings.rank} if row == "lot" else None,
        attention_dropout=0.0,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    tokens, labels = torch.randint(1, 256, (batch, length)), torch.randint(2, (batch,))

    def update() -> None:
        F.cross_entropy(model(tokens), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()

    return update


def _profiled(update: Callable[[], None]) -> dict[str, float]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        update()
    spent = dict.fromkeys([*_PARTS, "elementwise"], 0.0)
    for event in profile.key_averages():
        part = next((p for p, names in _PARTS.items() if any(name in event.key for name in names)), "elementwise")
        spent[part] += event.self_cpu_time_total
    whole = sum(spent.values())
    return {part: value / whole for part, value in spent.items()}


def _tables(records: list[Record]) -> list[Table]:
    """Tokens per second and the ratio to the last mechanism; below, where the time of an update goes."""
    cells = sorted((record.cell for record in records), key=lambda cell: cell.length)
    return [_speeds(cells, records[0].origin.settings["rows"]), _shares(cells)]


def _notes(records: list[Record]) -> list[str]:
    settings = records[0].origin.settings
    return [
        f"Forward, backward, clipping and AdamW; {settings['tokens']:,} tokens per update, LOT of rank "
        f"{settings['rank']}, softmax fused (no attention dropout). Mechanisms take turns; the fastest of "
        f"{settings['repeats']} updates, by processor time.",
        f"{records[0].provenance.where()}.",
    ]


def _speeds(cells: Sequence[Cell], rows: Sequence[str]) -> Table:
    by_place = {(cell.row, cell.length): cell for cell in cells}
    lengths = sorted({cell.length for cell in cells})
    body = []
    for length in lengths:
        speeds = [by_place[row, length].tokens_per_second for row in rows]
        ratios = [f"{speed / speeds[-1]:.1f}×" for speed in speeds[:-1]]
        body.append((f"{length:,}", str(by_place[rows[0], length].batch), *(f"{s:,.0f}" for s in speeds), *ratios))
    faster = [f"{row} against\n{rows[-1]}" for row in rows[:-1]]
    return Table("Training, tokens per second", ("length", "batch", *rows, *faster), tuple(body))


def _shares(cells: Sequence[Cell]) -> Table:
    parts = list(cells[0].parts)
    body = [
        (f"{cell.row}, {cell.length:,}", *(f"{100 * cell.parts[part]:.0f}" for part in parts))
        for cell in sorted(cells, key=lambda cell: (cell.row, cell.length))
    ]
    return Table("Where an update's time goes, %", ("model, length", *parts), tuple(body))


EXPERIMENT = Experiment(
    name="lra-throughput",
    about="How fast the Long Range Arena's encoder trains as sequences grow: LOT against fused softmax.",
    settings=ThroughputSettings,
    cell=Cell,
    plan=plan,
    tables=_tables,
    notes=_notes,
    extras=("train",),
)
