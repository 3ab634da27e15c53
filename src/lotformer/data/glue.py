"""GLUE from its TSV folders (`glue/CoLA/train.tsv`, …) or from Hugging Face datasets saved to disk (`glue/cola/`)."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Split = Literal["train", "dev"]
Metric = Literal["accuracy", "accuracy-f1", "matthews", "pearson-spearman"]


@dataclass(frozen=True)
class Task:
    """How one task is stored and scored. Columns are names in the header, or positions in files without one."""

    name: str
    folder: str
    texts: tuple[str | int, ...]
    label: str | int
    metric: Metric
    labels: tuple[str, ...] = ("0", "1")
    dev: str = "dev"

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
"""What a data folder has to hold, for help texts and errors."""


@dataclass(frozen=True)
class Example:
    """One text or a pair, and its label: the index of a class, or a number."""

    texts: tuple[str, ...]
    label: float


def load(task: Task, split: Split, folder: Path) -> list[Example]:
    """The examples of a split, in the file's order.

    Raises:
        FileNotFoundError: neither layout is there; the message names both places looked at.
    """
    saved = _saved(task, folder)
    if saved is not None:
        return _from_datasets(task, split, saved)
    return _from_table(task, _table(task, split, folder))


def files(task: Task, folder: Path) -> list[Path]:
    """The files that `load` reads for both splits."""
    saved = _saved(task, folder)
    if saved is not None:
        return [path for path in saved.rglob("*") if path.suffix in {".arrow", ".json"}]
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
    with path.open(encoding="utf-8-sig", newline="") as lines:
        rows = list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    if isinstance(task.label, str):
        header = rows.pop(0)
        columns = [header.index(str(name)) for name in (*task.texts, task.label)]
    else:
        columns = [int(position) for position in (*task.texts, task.label)]
    complete = [row for row in rows if len(row) > max(columns)]
    return [Example(tuple(row[c].strip() for c in columns[:-1]), _label(task, row[columns[-1]])) for row in complete]


def _label(task: Task, value: str) -> float:
    return float(value) if task.outputs == 1 else float(task.labels.index(value.strip()))


def _from_datasets(task: Task, split: Split, path: Path) -> list[Example]:
    try:
        from datasets import load_from_disk
    except ImportError as error:
        raise ImportError(f"{path} is a saved data set: reading it needs `pip install datasets`.") from error

    part = load_from_disk(str(path))["train" if split == "train" else _HUB_DEV.get(task.name, "validation")]
    names = _HUB_TEXTS.get(task.name, tuple(map(str, task.texts)))
    return [Example(tuple(row[name] for name in names), float(row["label"])) for row in part]
