"""GLUE as its tables say: every row is read, or refused with file and line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lotformer.data import glue

STSB, SST, COLA = glue.TASKS["stsb"], glue.TASKS["sst2"], glue.TASKS["cola"]
PAIRS = "index\tsentence1\tsentence2\tscore\n"


def stored(folder: Path, task: glue.Task, content: str) -> Path:
    path = folder / "glue" / task.folder / "dev.tsv"
    path.parent.mkdir(parents=True)
    path.write_bytes(content.encode())
    return path


@pytest.mark.parametrize(
    ("task", "content", "said"),
    [
        (STSB, PAIRS + "0\ta\tb\t1.0\n1\ta\tb\n", "line 3: expected 4 columns between tabs, got 3: '1\\ta\\tb'"),
        (STSB, PAIRS + "0\ta\tstray\tb\t1.0\n", "line 2: expected 4 columns between tabs, got 5"),
        (COLA, "gj04\t1\t\tOne.\ngj04\t0\t*\tTwo\tthree.\n", "line 2: expected 4 columns between tabs, got 5"),
        (STSB, PAIRS + "0\ta\tb\tnan\n", "line 2: expected a score from 0 to 5, got nan"),
        (STSB, PAIRS + "0\ta\tb\tinf\n", "line 2: expected a score from 0 to 5, got inf"),
        (STSB, PAIRS + "0\ta\tb\t-1\n", "line 2: expected a score from 0 to 5, got -1.0"),
        (STSB, PAIRS + "0\ta\tb\thigh\n", "line 2: expected a score from 0 to 5, got 'high'"),
        (SST, "sentence\tlabel\ngood\t2\n", "line 2: expected a label among 0, 1, got '2'"),
        (SST, "sentence\tlabel\ngood\t1\n\nbad\t0\n", "line 3: expected 2 columns between tabs, got 1: ''"),
        (SST, "text\tlabel\ngood\t1\n", "line 1: expected a header with sentence, label, got 'text\\tlabel'"),
        (SST, "sentence\tlabel\n", "expected examples of the dev set of sst2, found none"),
        (SST, "", "is empty"),
    ],
    ids=[
        "cut", "tab", "tab without header", "nan", "inf", "hidden", "word", "label", "blank", "header", "none", "empty",
    ],
)  # fmt: skip
def test_a_bad_row_is_named(tmp_path: Path, task: glue.Task, content: str, said: str) -> None:
    path = stored(tmp_path, task, content)
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        glue.load(task, "dev", tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("separator", ["\r", "\u2028", "\x85", "\x0b", "\x1c"], ids=repr)
def test_only_a_line_feed_ends_a_row(tmp_path: Path, separator: str) -> None:
    text = f"one{separator}two"
    stored(tmp_path, SST, f"sentence\tlabel\n{text}\t1\nlast\t0\r\n")
    assert glue.load(SST, "dev", tmp_path) == [glue.Example((text,), 1.0), glue.Example(("last",), 0.0)]


def test_a_text_may_be_as_long_as_it_likes(tmp_path: Path) -> None:
    stored(tmp_path, SST, f"sentence\tlabel\n{'word ' * 40_000}\t1\n")  # csv stops at 131,072 characters
    assert len(glue.load(SST, "dev", tmp_path)[0].texts[0]) == 199_999


@pytest.mark.parametrize("label", [-1, 2], ids=["hidden", "unknown"])
def test_a_bad_label_of_a_saved_data_set_is_named(tmp_path: Path, label: int) -> None:
    datasets = pytest.importorskip("datasets")
    part = datasets.Dataset.from_dict({"sentence": ["a", "b"], "label": [1, label]})
    datasets.DatasetDict({"train": part, "validation": part}).save_to_disk(str(tmp_path / "glue" / "sst2"))
    with pytest.raises(ValueError, match=rf"glue/sst2, validation, row 2: expected a label from 0 to 1, got {label}"):
        glue.load(SST, "dev", tmp_path)
