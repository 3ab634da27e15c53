"""The log of a run: what is in it stays in it, and what is no log is named."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from lotformer.training.logs import JsonLines

LINES = [json.dumps({"step": step, "loss": 1 / step}) for step in (1, 2, 3)]


def test_a_resumed_run_drops_later_lines_and_one_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for cut in range(len(LINES[2])):
        path.write_text("\n".join([*LINES[:2], LINES[2][:cut]]))
        JsonLines(path, every=1).started(step=2, steps=9)
        assert path.read_text() == "\n".join([*LINES[:2], ""])
    JsonLines(path, every=1).started(step=1, steps=9)
    assert path.read_text() == f"{LINES[0]}\n"
    JsonLines(path, every=1).started(step=0, steps=9)
    assert path.read_text() == ""


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (b"\xff\xfe", "not UTF-8"),
        (b"[1]", "is not a line of a run's log"),
        (b"3", "is not a line of a run's log"),
        (b'{"loss": 1}', "is not a line of a run's log"),
        (b'{"step": "two"}', "is not a line of a run's log"),
        (b'{"step": 2, "lo', "is not a line of a run's log"),
        (b"", "is not a line of a run's log"),
    ],
)
def test_a_damaged_line_is_named_and_nothing_is_lost(tmp_path: Path, damage: bytes, said: str) -> None:
    path = tmp_path / "log.jsonl"
    content = b"\n".join([LINES[0].encode(), damage, LINES[2].encode(), b""])
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"log\.jsonl, line 2.*{said}|log\.jsonl, line 2: {said}"):
        JsonLines(path, every=1).started(step=3, steps=9)
    assert path.read_bytes() == content


def test_numbers_that_are_not_finite_are_written_as_json(tmp_path):
    """Python would write NaN, at which every other reader of JSON stops."""
    log = JsonLines(tmp_path / "log.jsonl", every=1)
    log.started(0, 2)
    log.evaluated(1, {"top1": math.nan, "loss": math.inf, "images": 4.0})

    def refuse(word):
        raise ValueError(word)

    (line,) = (tmp_path / "log.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=refuse)["evaluation"] == {"top1": None, "loss": None, "images": 4.0}
