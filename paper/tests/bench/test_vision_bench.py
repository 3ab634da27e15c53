"""Benchmarks of whole vision models."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from lotformer.cli.main import app
from lotformer_paper.bench import vision_models


def test_the_step_of_a_model_is_timed_and_profiled(tmp_path: Path) -> None:
    words = ["bench", "model", "--sizes", "32", "--batches", "2", "--seconds", "0.01", "--rank", "4"]
    words += ["--threads", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    points = json.loads((tmp_path / "result.json").read_text())["points"]
    ours, theirs = "lot_deit_tiny_patch16_224", "deit_tiny_patch16_224"
    assert [point["model"] for point in points] == [ours, f"{ours}, keys alone", theirs]
    assert "2 × 32 px, 5 tokens, keys alone" in result.output.replace("\n", " ")
    for point in points:
        assert 0 < point["inference_ms"] < point["step_ms"]
        assert point["tokens"] == 5
        assert 0 < point["profile"]["attn"] + point["profile"]["mlp"] < 1


def test_all_rows_of_table_1_stand_beside_the_papers(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "vision-models", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    counts = {(c["backbone"], c["attention"]): c for c in json.loads((tmp_path / "result.json").read_text())["counts"]}
    assert len(counts) == len(vision_models.TABLE_1) == 25
    for row in vision_models.TABLE_1:
        counted = counts[row.backbone, row.attention]
        agrees = vision_models.agrees(counted["parameters"] / 1e6, row.parameters)
        agrees &= vision_models.agrees(counted["macs"] / 1e9, row.macs)
        assert agrees is ((row.backbone, row.attention) not in vision_models.WHY), row
    table = (tmp_path / "table.md").read_text()
    assert all(reason in table for found in vision_models.WHY.values() for reason in found)


def test_steps_in_the_loop_are_compared_with_bare_ones(tmp_path: Path) -> None:
    options = ["--model", "lot_vit_half", "--depth", "1", "--size", "32", "--batch", "2", "--steps", "4"]
    result = CliRunner().invoke(app, ["bench", "loop", *options, "--threads", "1", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    stored = json.loads((tmp_path / "result.json").read_text())
    assert [len(stored[name]) for name in ("bare", "loop", "bare_processor", "loop_processor")] == [3, 3, 3, 3]
    assert all(seconds > 0 for seconds in stored["bare"] + stored["loop"])
    assert "added" in (tmp_path / "table.md").read_text()
