"""GLUE from its TSV folders (`glue/CoLA/train.tsv`, …) or from Hugging Face datasets saved to disk (`glue/cola/`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..reading import decoding, shown, table
from .saved import saved_dataset, saved_files

Split = Literal["train", "dev"]
Metric = Literal["accuracy", "accuracy-f1", "matthews", "pearson-spearman"]


@dataclass(frozen=True)
class Task:
    """The files and the metric of one task. Columns are names in the header, or positions in files without one.

    `labels` are the names of the classes, `scores` the range of a regression.
    """

    name: str
    folder: str
    texts: tuple[str | int, ...]
    label: str | int
    metric: Metric
    labels: tuple[str, ...] = ("0", "1")
    dev: str = "dev"
    scores: tuple[float, float] = (0.0, 5.0)

    @property
    def outputs(self) -> int:
        """Classes, or one number for a regression."""
        return 1 if self.metric == "pearson-spearman" else len(self.labels)


_ENTAILMENT = ("entailment", "not_entailment")
_INFERENCE = ("entailment", "neutral", "contradiction")
_SENTENCES = ("sentence1", "sentence2")

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("cola", "CoLA", (3,), 1, "matthews"),
        Task("sst2", "SST-2", ("sentence",), "label", "accuracy"),
        Task("mrpc", "MRPC", ("#1 String", "#2 String"), "Quality", "accuracy-f1"),
        Task("stsb", "STS-B", _SENTENCES, "score", "pearson-spearman"),
        Task("qqp", "QQP", ("question1", "question2"), "is_duplicate", "accuracy-f1"),
        Task("mnli", "MNLI", _SENTENCES, "gold_label", "accuracy", _INFERENCE, "dev_matched"),
        Task("qnli", "QNLI", ("question", "sentence"), "label", "accuracy", _ENTAILMENT),
        Task("rte", "RTE", _SENTENCES, "label", "accuracy", _ENTAILMENT),
        Task("wnli", "WNLI", _SENTENCES, "label", "accuracy"),
    )
}  # fmt: skip

_HUB_TEXTS = {"cola": ("sentence",), "mrpc": _SENTENCES, "mnli": ("premise", "hypothesis")}
_HUB_DEV = {"mnli": "validation_matched"}


WANTED = (
    "glue/: the GLUE tables from gluebenchmark.com as unpacked (glue/STS-B/train.tsv and dev.tsv, …), or "
    "data sets saved to disk by Hugging Face `datasets` (glue/stsb/, …)"
)
"""The expected contents of a data folder, for help texts and errors."""


@dataclass(frozen=True)
class Example:
    """One text or a pair, and its label: the index of a class, or a number."""

    texts: tuple[str, ...]
    label: float


def load(task: Task, split: Split, folder: Path) -> list[Example]:
    """The examples of a split, in the file's order.

    Raises:
        FileNotFoundError: neither layout is there; the message names both places looked at.
        ValueError: a row is not as the format says, with its file and line, or there is none.
    """
    saved = _saved(task, folder)
    place = _table(task, split, folder) if saved is None else saved
    examples = _from_table(task, place) if saved is None else _from_datasets(task, split, place)
    if not examples:
        raise ValueError(f"{place}: expected examples of the {split} set of {task.name}, found none.")
    return examples


def files(task: Task, folder: Path) -> list[Path]:
    """The files that `load` reads for both splits."""
    saved = _saved(task, folder)
    if saved is not None:
        return saved_files(saved)
    return [_table(task, split, folder) for split in ("train", "dev")]


def _saved(task: Task, folder: Path) -> Path | None:
    place = folder / "glue" / task.name
    return place if (place / "dataset_dict.json").is_file() else None


def _table(task: Task, split: Split, folder: Path) -> Path:
    path = folder / "glue" / task.folder / f"{'train' if split == 'train' else task.dev}.tsv"
    if not path.is_file():
        saved = folder / "glue" / task.name
        raise FileNotFoundError(f"no {task.name} {split} set: expected {path}, or a Hugging Face data set in {saved}.")
    return path


def available(folder: Path) -> list[str]:
    """The tasks whose train and dev sets are both there."""

    def complete(task: Task) -> bool:
        if _saved(task, folder) is not None:
            return True
        place = folder / "glue" / task.folder
        return (place / "train.tsv").is_file() and (place / f"{task.dev}.tsv").is_file()

    return [name for name, task in TASKS.items() if complete(task)]


def _from_table(task: Task, path: Path) -> list[Example]:
    """Every row has as many columns as the header, so a text with a tab, or a row cut short, cannot pass."""
    rows = table(path)
    names = (*task.texts, task.label)
    columns = [name for name in names if isinstance(name, int)]
    width, header = max(columns, default=-1) + 1, ", ".join(map(str, names))
    if not columns:
        _, found = next(rows)
        if any(name not in found for name in names):
            raise ValueError(f"{path}, line 1: expected a header with {header}, got {shown(chr(9).join(found))}.")
        columns, width = [found.index(str(name)) for name in names], len(found)
    examples = []
    for line, row in rows:
        if len(row) != width:
            what = shown("\t".join(row))
            raise ValueError(f"{path}, line {line}: expected {width} columns between tabs, got {len(row)}: {what}.")
        *texts, label = (row[column].strip() for column in columns)
        examples.append(Example(tuple(texts), _label(task, label, f"{path}, line {line}")))
    return examples


def _label(task: Task, value: str, where: str) -> float:
    if task.outputs > 1:
        if value not in task.labels:
            raise ValueError(f"{where}: expected a label among {', '.join(task.labels)}, got {shown(value)}.")
        return float(task.labels.index(value))
    try:
        score: Any = float(value)
    except ValueError:
        score = value
    return _within(task, score, where)


def _within(task: Task, label: Any, where: str) -> float:
    """A label that is a number already: the index of a class, or a score."""
    known = isinstance(label, (int, float)) and math.isfinite(label)
    if task.outputs == 1:
        low, high = task.scores
        if not known or not low <= label <= high:
            raise ValueError(f"{where}: expected a score from {low:g} to {high:g}, got {label!r}.")
    elif not known or label not in range(len(task.labels)):
        raise ValueError(f"{where}: expected a label from 0 to {len(task.labels) - 1}, got {label!r}.")
    return float(label)


def _from_datasets(task: Task, split: Split, path: Path) -> list[Example]:
    names = _HUB_TEXTS.get(task.name, tuple(map(str, task.texts)))
    part = "train" if split == "train" else _HUB_DEV.get(task.name, "validation")
    sets = saved_dataset(path)
    with decoding(path, f"a saved data set of {task.name} with a split {part!r} and its columns"):
        rows = [(tuple(row[name] for name in names), row["label"]) for row in sets[part]]
    examples = []
    for number, (texts, label) in enumerate(rows, 1):
        where = f"{path}, {part}, row {number}"
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{where}: expected {' and '.join(names)} to be texts, got {shown(str(texts))}.")
        examples.append(Example(texts, _within(task, label, where)))
    return examples
