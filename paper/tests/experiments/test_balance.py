"""Which sums to impose: both experiments over seeds, cells that others have left, and one table over all of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lotformer.cli.main import app
from lotformer_paper.experiments import balance, engine, glue, stsb
from lotformer_paper.results.cells import CellFolder, Origin
from support.word_encoder import save_word_encoder

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "green", "blue", "old", "house", "tree", "river", "is"]
BRIEF = balance.BalanceSettings(
    seeds=(0, 3),
    stsb_calibration_steps=2,
    glue_epochs=1.0,
    glue_max_steps=1,
    glue_calibration_steps=2,
    glue_imitation_steps=1,
)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    return save_word_encoder(tmp_path / "checkpoint", WORDS, initializer_range=0.3)


@pytest.fixture
def data(tmp_path) -> Path:
    texts = [f"{a} {b} is {c}" for a in WORDS[5:9] for b in WORDS[9:12] for c in WORDS[5:9]]
    others = texts[5:] + texts[:5]
    pairs = list(zip(texts, others, strict=True))
    tables = {
        "CoLA": ("", [f"x\t{i % 2}\t\t{text}" for i, text in enumerate(texts)]),
        "MRPC": ("Quality\t#1 String\t#2 String", [f"{i % 2}\t{a}\t{b}" for i, (a, b) in enumerate(pairs)]),
        "STS-B": ("sentence1\tsentence2\tscore", [f"{a}\t{b}\t{i % 5}" for i, (a, b) in enumerate(pairs)]),
    }
    for task, (header, rows) in tables.items():
        folder = tmp_path / "glue" / task
        folder.mkdir(parents=True)
        for split, part in (("train", rows[:32]), ("dev", rows[38:])):
            (folder / f"{split}.tsv").write_text("\n".join([*([header] if header else []), *part]))
    return tmp_path


def run(checkpoint, data, out, settings, listen):
    return engine.run(balance.EXPERIMENT, settings, out, listen, checkpoint=checkpoint, data_dir=data)


def test_every_seed_has_the_cells_of_both_experiments(checkpoint, data, tmp_path):
    out = tmp_path / "out"
    told: list[str] = []
    run(checkpoint, data, out, BRIEF, lambda what, *_: told.append(what))
    for seed in BRIEF.seeds:
        pairs = engine.records(stsb.EXPERIMENT, out / f"seed{seed}/stsb")
        assert {(one.cell.variant, one.cell.stage) for one in pairs} == {
            (variant, stage) for variant in balance.VARIANTS for stage in ("converted", "calibrated")
        }
        for task in BRIEF.glue_tasks:
            made = sorted(path.stem for path in (out / f"seed{seed}/glue/{task}").glob("*.json"))
            assert made == ["lot-near", "lot-near-keys", "lot-near-none", "softmax"]
        assert f"seed {seed}: lot-near-none: calibrating" in told
    told.clear()
    run(checkpoint, data, out, BRIEF, lambda what, *_: told.append(what))
    assert not told, "finished cells are read, not run"


def options(checkpoint: Path, data: Path, out: Path, **others: object) -> list[str]:
    given = {"checkpoint": checkpoint, "data-dir": data, "out": out, **others}
    return [str(part) for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]


def test_cells_of_the_two_commands_are_found_and_not_run_again(checkpoint, data, tmp_path):
    """Both experiments are run by their own commands first; what they left is marked to be recognised."""
    out, runner = tmp_path / "out", CliRunner()
    places = [options(checkpoint, data, out / f"seed4/{name}", seed=4) for name in ("stsb", "glue")]
    by_hand = [
        ["stsb", *places[0], "--variants", "lot-near,lot-near-keys,lot-near-none", "--finetune-steps", "0",
         "--calibration-steps", "2"],
        ["glue", *places[1], "--tasks", "cola,mrpc", "--methods", "lot-near,lot-near-keys,lot-near-none",
         "--epochs", "3", "--max-steps", "1", "--calibration-steps", "2", "--imitation-steps", "1",
         "--swap-epochs", "0"],
    ]  # fmt: skip
    for command in by_hand:
        result = runner.invoke(app, ["experiment", *command])
        assert result.exit_code == 0, result.output
    marked = out / "seed4/stsb/lot-near-keys/calibrated.json"
    stored = json.loads(marked.read_text())
    stored["cell"]["scores"]["all"]["recovered"] = 77.125
    marked.write_text(json.dumps(stored))

    steps = {"stsb_calibration_steps": 2, "glue_max_steps": 1, "glue_calibration_steps": 2, "glue_imitation_steps": 1}
    result = runner.invoke(app, ["experiment", "balance", *options(checkpoint, data, out, seeds="4", **steps)])
    assert result.exit_code == 0, result.output
    table = (out / "table.md").read_text()
    assert "| lot-near-keys | 77.12 (1) |" in table
    (out / "table.md").unlink()
    assert engine.name_of(out) == "balance"
    assert runner.invoke(app, ["render", str(out)]).exit_code == 0
    assert (out / "table.md").read_text() == table


def store(out: Path, seed: int, row: str, stage: str = "calibrated", **tasks: float | None) -> None:
    """Cells of one row as runs with this seed leave them; a task's value is the percentage it keeps."""
    settings = dataclasses.asdict(BRIEF.stsb(seed))
    if (kept := tasks.pop("stsb", None)) is not None:
        score = stsb.Score(1500, 0.8, 0.008 * kept, kept, kept / 100)
        cell = stsb.Cell(row, stage, {"all": score}, 1e-7, 10.0 ** (seed - 9), 0.9, 30.0, 1.0)
        folder = CellFolder(out / f"seed{seed}/stsb/{row}", stsb.Cell, stsb.EXPERIMENT.name, f"lotformer stsb {seed}")
        folder.finish(stage, cell, Origin(settings, {}), {"steps": 250, "texts": 9}, seed)
    for task, recovered in tasks.items():
        made = glue.Cell(task, row, 50.0, recovered, None, 1e-6, 0.5, 1.0)
        folder = CellFolder(out / f"seed{seed}/glue/{task}", glue.Cell, glue.EXPERIMENT.name, f"lotformer glue {seed}")
        folder.finish(row, made, Origin(dataclasses.asdict(BRIEF.glue(seed)), {}), {"steps": 0}, seed)


class TestTable:
    def test_is_the_mean_and_deviation_over_the_seeds_that_are_there(self, tmp_path):
        store(tmp_path, 0, "lot", stsb=99.0, cola=80.0, mrpc=90.0)
        store(tmp_path, 1, "lot", stsb=98.0, cola=82.0)
        store(tmp_path, 10, "lot", stsb=100.0, cola=None)
        store(tmp_path, 0, "lot-aware-keys", stsb=99.5)
        said = engine.report(balance.EXPERIMENT, tmp_path).markdown()
        assert "| lot | 99.00 ± 1.00 (3) | 0.9900 ± 0.0100 (3) | 81.0 ± 1.4 (2) | 90.0 (1) | 1e+01 |" in said
        assert "| lot-aware-keys | 99.50 (1) | 0.9950 (1) | – | – | 1e-09 |" in said
        assert "lot-keys |" not in said, "a row without a cell"

    def test_seeds_that_were_given_the_same_share_a_line(self, tmp_path):
        for seed in (0, 1):
            store(tmp_path, seed, "lot", stsb=99.0, cola=80.0, mrpc=90.0)
        store(tmp_path, 1, "softmax", cola=100.0)
        pairs, converted, softmax = engine.report(balance.EXPERIMENT, tmp_path).notes[-3:]
        assert pairs.startswith("STS-B: rank 32; 250 steps on 9 texts")
        assert converted.startswith("CoLA, MRPC: converted: 2 steps of calibration")
        assert softmax.startswith("CoLA: softmax: 1 epochs")
        assert "tokens, seeds 0, 1;" in pairs
        assert "tokens, seeds 0, 1;" in converted
        assert "tokens, seed 1;" in softmax
        assert f"torch {torch.__version__}" in pairs

    def test_shows_one_stage_of_all(self, tmp_path):
        """Calibrated and fine-tuned models do not mix in a mean."""
        store(tmp_path, 0, "lot", stsb=99.0)
        assert "STS-B, calibrated:" in engine.report(balance.EXPERIMENT, tmp_path).markdown()
        store(tmp_path, 1, "lot", stage="fine-tuned", stsb=98.0)
        said = engine.report(balance.EXPERIMENT, tmp_path).markdown()
        assert "| lot | 98.00 (1) |" in said
        assert "STS-B, fine-tuned:" in said

    def test_needs_a_finished_cell(self, tmp_path):
        store(tmp_path, 0, "softmax", cola=100.0)
        with pytest.raises(ValueError, match="holds no finished cell"):
            engine.report(balance.EXPERIMENT, tmp_path)


def test_the_last_seed_is_looked_at_before_the_first_begins(checkpoint, data, tmp_path):
    store(tmp_path / "out", 3, "lot", mrpc=90.0)
    told: list[str] = []
    with pytest.raises(ValueError, match=r"seed3/glue/mrpc holds cells made from something else"):
        run(checkpoint, data, tmp_path / "out", BRIEF, lambda what, *_: told.append(what))
    assert not told


def test_the_budget_is_that_of_the_commands_in_the_table():
    """The defaults are part of what the numbers mean."""
    settings = balance.BalanceSettings()
    assert settings.seeds == (0, 1, 2)
    assert settings.stsb(5) == stsb.StsbSettings(finetune_steps=0, seed=5)
    assert settings.glue(5) == glue.GlueSettings(
        epochs=3.0, max_steps=400, calibration_steps=150, imitation_steps=100, swap_epochs=0.0, seed=5
    )


@pytest.mark.parametrize("task", ["stsb", "colour"])
def test_tasks_that_it_has_no_place_for_are_refused(task):
    with pytest.raises(ValueError, match=rf"glue_tasks must be among cola, .* got '{task}'"):
        balance.BalanceSettings(glue_tasks=("cola", task))
