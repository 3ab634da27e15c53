"""A task of the Long Range Arena for the training loop."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lotformer.conversion.measuring.couplings import couplings_watched
from lotformer.settings import name_value_pairs
from lotformer.training.loader import LoaderStream
from lotformer.training.stream import TrainingStream
from lotformer.training.task import Sums
from lotformer.training.teams import Process

from ...data.longrange.batches import Batch, by_length, collate
from ...data.longrange.prepare import OnShard
from ...data.longrange.store import PreparedSet, Split
from ...data.longrange.tasks import TASKS, prepared, source
from ...models.longrange import LongRangeEncoder
from .settings import LongRangeSettings


class LongRange:
    """One task with one mechanism; judged by accuracy on the validation set.

    Attributes:
        model: what `build_model` built last; on one process, training changes it in place.
    """

    metric, higher_is_better = "accuracy", True

    def __init__(self, settings: LongRangeSettings, sets: PreparedSet) -> None:
        self.name = f"lra-{settings.task}"
        self.settings, self.sets = settings, sets
        self.model: LongRangeEncoder | None = None

    def build_model(self) -> nn.Module:
        self.model = build_model(self.settings)
        return self.model

    def stream(self, process: Process) -> TrainingStream:
        s, data = self.settings, self.sets["train"]
        if len(data) < s.part_size:
            raise ValueError(f"a batch needs {s.part_size} examples and the set has {len(data)}: use fewer.")
        return LoaderStream(
            data,
            partial(by_length, data.lengths(), s.part_size, s.seed),
            seed=s.seed,
            process=process,
            collate=collate,
            workers=s.workers,
            described=f"{self.sets.folder.name}, {self.sets.fingerprint}",
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["tokens"], batch.get("mask"))
        return F.cross_entropy(logits, batch["labels"], label_smoothing=self.settings.label_smoothing)

    def evaluate(self, model: nn.Module, process: Process) -> Sums:
        return self.count_right(model, "dev", process)

    @torch.no_grad()
    def count_right(self, model: nn.Module, split: str, process: Process = Process()) -> Sums:  # noqa: B008  frozen
        """Accuracy and loss on a split, or on `settings.evaluated` examples spread over it."""
        device = next(model.parameters()).device
        right = loss = seen = 0.0
        for batch in self._batches(self.sets[split], process):
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            logits = model(batch["tokens"], batch.get("mask")).float()
            right += float((logits.argmax(1) == batch["labels"]).sum())
            loss += float(F.cross_entropy(logits, batch["labels"], reduction="sum"))
            seen += len(logits)
        return {"accuracy": (right, seen), "loss": (loss, seen)}

    @torch.no_grad()
    def residuals(self, model: nn.Module, split: str = "dev") -> list[float]:
        """Residuals of LOT's couplings, layer by layer, on the first batch."""
        with couplings_watched(model) as found:
            batch = next(self._batches(self.sets[split], Process()))
            model(batch["tokens"], batch.get("mask"))
        return list(found.values())

    def tokens_per_example(self) -> float:
        """The mean over the training set, all documents of an example together."""
        data = self.sets["train"]
        return float(data.tokens_per_example().mean())

    def _batches(self, data: Split, process: Process) -> Iterator[Batch]:
        """Examples of this process, of similar length together: little is padded."""
        count = min(len(data), self.settings.evaluated or len(data))
        chosen = np.arange(count) * len(data) // count
        chosen = chosen[process.index :: process.count]
        chosen = chosen[np.argsort(data.lengths()[chosen], kind="stable")]
        size = self.settings.part_size
        for number in range(math.ceil(len(chosen) / size)):
            yield collate(data.__getitems__(chosen[number * size : (number + 1) * size].tolist()))


def build_model(settings: LongRangeSettings) -> LongRangeEncoder:
    """The encoder for the task and the mechanism of the settings.

    Raises:
        ValueError: the mechanism has no such option, or does not allow its value.
    """
    task = TASKS[settings.task]
    try:
        return LongRangeEncoder(
            vocabulary=task.vocabulary,
            max_length=task.max_length,
            classes=task.classes,
            documents=task.documents,
            grid=task.grid,
            attention=settings.attention,
            attention_options=name_value_pairs(settings.attention_options),
            local_mixing=settings.local_mixing,
            pooling=settings.pooling,
            dropout=settings.dropout,
            attention_dropout=settings.attention_dropout,
        )
    except TypeError as error:
        raise ValueError(f"attention_options do not suit {settings.attention!r}: {error}") from error


def prepared_sets(
    settings: LongRangeSettings, folder: Path, listener: OnShard = lambda done, total: None
) -> PreparedSet:
    """The sets of the task in a data folder, made now unless they are there."""
    chosen = source(
        settings.task, folder, seed=settings.data_seed, brackets=settings.brackets, released=settings.released
    )
    return prepared(chosen, folder, listener=listener)
