"""Speed of whole converted vision transformers at several sizes of the image.

Speed does not depend on what was learned, so nothing is: fresh mechanisms, random pixels. Models take turns and the
best run of each counts. With one thread it is the processor's time, which other work does not lengthen.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lotformer.cli.tables import Table
from lotformer.cli.terminal import Listener
from lotformer.settings import Settings, setting

from ...results.cells import Origin, Record
from ..engine import Cells, Experiment, Job, described
from ..every_length import convert_at_every_length

VARIANTS: dict[str, dict[str, Any]] = {
    "lot, 13 × 13": {"pivots": "input-aware", "balance": "keys", "window_size": 13},
    "lot, 9 × 9": {"pivots": "input-aware", "balance": "keys", "window_size": 9},
    "lot, 5 × 5": {"pivots": "input-aware", "balance": "keys", "window_size": 5},
    "lot, fixed, 5 × 5": {"pivots": "fixed", "balance": "keys", "window_size": 5},
    "transport alone": {"pivots": "fixed", "balance": "keys", "window": None, "prefix_tokens": 0},
}
"""Options of `convert`, from the nearest to the original over its default, the second, to the fastest."""


@dataclass(frozen=True)
class SpeedSettings(Settings):
    """Models, sizes and time per measurement."""

    model: str = setting("vit_small_patch14_dinov2", "Name of the model in timm.")
    sizes: tuple[int, ...] = setting((224, 518, 1036), "Pixels a side.")
    rank: int = setting(32, "Pivots per head.", at_least=1)
    batch_size: int = setting(1, "Images at a time.", at_least=1)
    repeats: int = setting(5, "Turns of every model.", at_least=1)
    seed: int = setting(0, "Random seed.")


@dataclass(frozen=True)
class Cell:
    """Seconds a forward pass at one size, by model; "softmax" is the original."""

    size: int
    tokens: int
    seconds: dict[str, float]


def plan(settings: SpeedSettings, listen: Listener) -> Iterator[Job]:
    """A job for every size."""
    origin = Origin({**described(settings, "sizes"), "variants": VARIANTS}, {})
    for size in settings.sizes:
        yield Job({f"{size}": origin}, partial(_timed, size, settings, listen), settings.seed)


def _arranged(records: list[Record]) -> list[Record]:
    return sorted(records, key=lambda record: int(record.cell.size))


def _tables(records: list[Record]) -> list[Table]:
    """A row for each size, a column for each model."""
    rows = []
    for cell in (record.cell for record in records):
        softmax = cell.seconds["softmax"]
        others = [
            f"{value:.3f} s, {softmax / value:.2f} ×" for name, value in cell.seconds.items() if name != "softmax"
        ]
        rows.append((f"{cell.size} px, {cell.tokens} tokens", f"{softmax:.3f} s", *others))
    columns = ("", *(name.replace(", ", ",\n") for name in records[0].cell.seconds))
    return [Table("A forward pass of the whole model, and × softmax", columns, tuple(rows))]


def _notes(records: list[Record]) -> list[str]:
    settings, source = records[0].origin.settings, records[0].provenance
    clock = "processor's time" if source.threads == 1 else "time"
    note = f"{settings['model']}, rank {settings['rank']}, batch {settings['batch_size']}; {clock}, best of "
    return [f"{note}{settings['repeats']} turns; {source.where()}."]


def _timed(size: int, settings: SpeedSettings, listen: Listener, cells: Cells) -> None:
    cells.begin(f"{size}")
    torch.manual_seed(settings.seed)
    models = {"softmax": _build(settings)}
    for name, options in VARIANTS.items():
        models[name] = _build(settings)
        convert_at_every_length(models[name], "lot", rank=settings.rank, **options)
    images = torch.randn(settings.batch_size, 3, size, size)
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    best = dict.fromkeys(models, float("inf"))
    with torch.no_grad():
        for turn in range(settings.repeats):
            listen(f"{size} px", turn, settings.repeats)
            for name, model in models.items():
                begun = clock()
                model(images)
                best[name] = min(best[name], clock() - begun)
        tokens: Any = models["softmax"].forward_features(images[:1])  # type: ignore[operator]
    cells.finish(f"{size}", Cell(size, tokens.shape[1], best), {"turns": settings.repeats})


def _build(settings: SpeedSettings) -> nn.Module:
    import timm

    options: dict[str, Any] = {"num_classes": 0, "dynamic_img_size": True}
    model: nn.Module = timm.create_model(settings.model, **options)
    return model.eval()


EXPERIMENT = Experiment(
    name="survival-speed",
    about="A vision transformer: how much faster it is converted, whole, at several sizes of the image.",
    settings=SpeedSettings,
    cell=Cell,
    plan=plan,
    arranged=_arranged,
    tables=_tables,
    notes=_notes,
)
