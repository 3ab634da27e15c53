"""GLUE: every layout is read, every task scored by its own metric, and the experiment resumes."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner

from lotformer.cli.main import app
from lotformer.data import glue
from lotformer.settings import make
from lotformer_paper.experiments import engine
from lotformer_paper.experiments import glue as experiment
from lotformer_paper.results.cells import CellFolder, Origin
from lotformer_paper.results.sources import checkpoint_source, files_source
from support.word_encoder import save_word_encoder

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "green", "blue", "house", "tree", "is", "a", "the", "not"]


def write(folder: Path, name: str, lines: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def sst(folder: Path) -> None:
    rows = [f"{a} {b} is {c}\t{int(c == 'red')}" for a in ("the", "a") for b in ("house", "tree") for c in WORDS[5:8]]
    for split in ("train", "dev"):
        write(folder / "glue" / "SST-2", split, ["sentence\tlabel", *rows])


class TestReading:
    def test_a_table_without_a_header(self, tmp_path):
        write(tmp_path / "glue" / "CoLA", "dev", ["gj04\t1\t\tThe sailors rode.", "cj99\t0\t*\tAs you eat the most."])
        examples = glue.load(glue.TASKS["cola"], "dev", tmp_path)
        assert examples == [glue.Example(("The sailors rode.",), 1.0), glue.Example(("As you eat the most.",), 0.0)]

    def test_quotes_are_text_and_a_byte_order_mark_is_not(self, tmp_path):
        header = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String"
        write(tmp_path / "glue" / "MRPC", "train", [header, '1\t1\t2\tHe said " no .\tShe said " no " .'])
        assert glue.load(glue.TASKS["mrpc"], "train", tmp_path)[0].texts == ('He said " no .', 'She said " no " .')

    def test_named_labels_and_numbers(self, tmp_path):
        write(tmp_path / "glue" / "RTE", "dev", ["index\tsentence1\tsentence2\tlabel", "0\ta\tb\tnot_entailment"])
        write(tmp_path / "glue" / "STS-B", "dev", ["sentence1\tsentence2\tscore", "a\tb\t2.5"])
        assert glue.load(glue.TASKS["rte"], "dev", tmp_path) == [glue.Example(("a", "b"), 1.0)]
        assert glue.load(glue.TASKS["stsb"], "dev", tmp_path) == [glue.Example(("a", "b"), 2.5)]

    def test_datasets_saved_to_disk(self, tmp_path):
        from datasets import Dataset, DatasetDict

        part = Dataset.from_dict({"premise": ["a"], "hypothesis": ["b"], "label": [2]})
        DatasetDict({"train": part, "validation_matched": part}).save_to_disk(str(tmp_path / "glue" / "mnli"))
        assert glue.load(glue.TASKS["mnli"], "dev", tmp_path) == [glue.Example(("a", "b"), 2.0)]
        assert glue.available(tmp_path) == ["mnli"]

    def test_a_missing_set_names_both_places(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"SST-2/train.tsv, or a Hugging Face data set in .*sst2"):
            glue.load(glue.TASKS["sst2"], "train", tmp_path)


class _Fixed(torch.nn.Module):
    def __init__(self, logits: list[list[float]]) -> None:
        super().__init__()
        self.logits = torch.tensor(logits)

    def forward(self, labels: torch.Tensor) -> transformers.modeling_outputs.SequenceClassifierOutput:
        return transformers.modeling_outputs.SequenceClassifierOutput(logits=self.logits)


@pytest.mark.parametrize(
    ("task", "logits", "labels", "expected"),
    [
        ("sst2", [[1, 0], [0, 1], [0, 1], [1, 0]], [0, 1, 0, 0], 75.0),
        ("cola", [[1, 0], [0, 1], [0, 1], [1, 0]], [0, 1, 0, 0], 57.735),
        ("mrpc", [[1, 0], [0, 1], [0, 1], [1, 0]], [0, 1, 0, 0], 100 * (0.75 + 2 / 3) / 2),
        ("stsb", [[1.0], [2.0], [4.0]], [1.0, 2.0, 4.0], 100.0),
    ],
    ids=["accuracy", "matthews", "accuracy-f1", "correlations"],
)
def test_every_metric_is_the_tasks_own(task, logits, labels, expected):
    batch = {"labels": torch.tensor(labels)}
    assert experiment.evaluate(_Fixed(logits), [batch], glue.TASKS[task]) == pytest.approx(expected, abs=0.01)


def run(checkpoint, data, out, tasks, methods, settings, listen=engine.silent):
    return engine.run(
        experiment.EXPERIMENT, settings, out, listen, checkpoint=checkpoint, data_dir=data, tasks=", ".join(tasks),
        methods=", ".join(methods),
    )  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    return save_word_encoder(tmp_path / "checkpoint", WORDS)


def test_the_experiment_fills_its_table_and_resumes(checkpoint, tmp_path):
    sst(tmp_path)
    settings = experiment.GlueSettings(
        epochs=60, lr=3e-3, swap_epochs=5, batch_size=6, calibration_steps=4, imitation_steps=10
    )
    methods = ["t2r", "t2r-hh", "hedgehog", "lot", "lot-uniform", "lot-aware"]
    out = tmp_path / "out"
    cells = run(checkpoint, tmp_path, out, ["sst2"], methods, settings)
    assert [cell.method for cell in cells] == ["softmax", *methods]
    by_name = {cell.method: cell for cell in cells}
    assert by_name["softmax"].score > 80
    assert by_name["lot"].residual_max is not None
    assert by_name["lot"].residual_max < 1e-4
    assert by_name["lot-uniform"].doubly_stochastic_mean is not None
    assert by_name["lot-uniform"].doubly_stochastic_mean < 1e-4
    rendered = engine.render(out).markdown()
    assert all(f"| {method}, % recovered |" in rendered for method in methods)

    stored = json.loads((out / "sst2" / "lot.json").read_text())
    assert stored["provenance"]["budget"] == {"steps": 10}
    assert stored["provenance"]["versions"]["torch"] == torch.__version__
    assert stored["provenance"]["versions"]["transformers"] == transformers.__version__
    assert stored["origin"]["sources"]["checkpoint"]["sha256"] == checkpoint_source(checkpoint).sha256
    assert not list(out.rglob("*.begun"))
    stored["cell"]["recovered"] = 12.5
    (out / "sst2" / "lot.json").write_text(json.dumps(stored))
    again = run(checkpoint, tmp_path, out, ["sst2"], methods, settings)
    assert {cell.method: cell.recovered for cell in again}["lot"] == 12.5


def paper(**chosen: object) -> experiment.GlueSettings:
    """As `--recipe paper` makes them."""
    return make(experiment.GlueSettings, experiment.EXPERIMENT.completed({"recipe": "paper", **chosen}))


class TestRecipeOfThePaper:
    def test_is_that_of_the_appendix(self):
        settings = paper()
        assert (settings.batch_size, settings.swap_lr, settings.swap_epochs) == (8, 1e-5, 5)
        assert settings.imitation_steps == 0
        assert settings.calibration(batches=40) == 200
        for method in experiment.METHODS.values():
            taught = settings.taught(method)
            assert (taught.calibration_lr, taught.mechanism_lr) == (1e-2, 1e-5)
            assert experiment.GlueSettings().taught(method) == method

    def test_what_is_given_wins(self):
        settings = paper(batch_size=4, calibration_steps=7, max_swap_steps=3)
        assert (settings.batch_size, settings.calibration(batches=40)) == (4, 7)

    def test_labels_come_after_the_swap_and_the_note_says_whose_recipe_it_is(self, checkpoint, tmp_path):
        sst(tmp_path)
        told: list[str] = []
        settings = paper(epochs=2, batch_size=6, swap_epochs=2, max_swap_steps=3, calibration_steps=4)
        listen = lambda what, now, total: told.append(f"{what} {now}/{total}")  # noqa: E731
        methods = ["t2r", "hedgehog", "lot"]
        run(checkpoint, tmp_path, tmp_path / "out", ["sst2"], methods, settings, listen)
        assert told[-1] == "sst2: fine-tuning lot 3/3"
        assert "sst2: calibrating hedgehog 4/4" in told
        assert not any("imitates" in what or "calibrating t2r" in what for what in told)
        said = engine.render(tmp_path / "out").markdown()
        assert "the paper's recipe, calibration at 0.01 for at most 5 epochs and 4 steps with early stopping" in said
        assert "2 epochs with labels, at most 3 steps, lr 1e-05" in said

    def test_cells_of_our_own_recipe_are_found_as_they_were_stored(self, store, checkpoint, tmp_path):
        """They were made when there was no choice."""
        store(cell("sst2", "softmax"), experiment.GlueSettings())
        store(cell("sst2", "lot"), experiment.GlueSettings())
        path = tmp_path / "out" / "sst2" / "lot.json"
        stored = json.loads(path.read_text())
        del stored["origin"]["settings"]["recipe"]
        path.write_text(json.dumps(stored))
        arguments = (checkpoint, tmp_path, tmp_path / "out", ["sst2"], ["lot"])
        assert len(run(*arguments, experiment.GlueSettings())) == 2
        with pytest.raises(ValueError, match="recipe not recorded instead of paper"):
            run(*arguments, paper(**dataclasses.asdict(dataclasses.replace(experiment.GlueSettings(), recipe="paper"))))


def cell(task: str, method: str, **changed: object) -> experiment.Cell:
    return dataclasses.replace(experiment.Cell(task, method, 90.0, 99.0, 80.0, 1e-6, 0.5, 3.0), **changed)


@pytest.fixture
def store(checkpoint, tmp_path):
    """Puts a cell into a folder as a run on this checkpoint and these data would."""
    sst(tmp_path)
    for task in ("CoLA", "RTE"):
        write(tmp_path / "glue" / task, "train", ["x"])
        write(tmp_path / "glue" / task, "dev", ["x"])

    def put(made: experiment.Cell, settings: experiment.GlueSettings) -> None:
        task = glue.TASKS[made.task]
        texts = files_source(f"glue/{task.folder}", glue.files(task, tmp_path))
        origin = Origin(dataclasses.asdict(settings), {"checkpoint": checkpoint_source(checkpoint), "data": texts})
        folder = CellFolder(
            tmp_path / "out" / made.task, experiment.Cell, experiment.EXPERIMENT.name, "lotformer experiment glue"
        )
        folder.finish(made.method, made, origin, {"steps": 77}, settings.seed)

    return put


class TestFoldersOfCells:
    def test_the_report_joins_what_several_runs_left_and_names_their_budgets(self, store, tmp_path):
        short = experiment.GlueSettings(max_steps=300, seed=5)
        store(cell("cola", "softmax"), short)
        store(cell("cola", "lot", recovered=98.7), short)
        store(cell("rte", "softmax", score=60.0), experiment.GlueSettings(batch_size=8))
        store(cell("rte", "lot", recovered=99.3), experiment.GlueSettings(batch_size=8))
        store(cell("rte", "hedgehog", recovered=97.1), experiment.GlueSettings(batch_size=8))
        said = engine.render(tmp_path / "out").markdown()
        assert said.startswith("`lotformer experiment glue`")
        assert "| softmax, score | 90.0 | 60.0 | 75.0 |" in said
        assert "| lot, % recovered | 98.7 | 99.3 | 99.0 |" in said
        assert "| hedgehog, % recovered | – | 97.1 | – |" in said, "a mean over fewer tasks is not comparable"
        notes = {": ".join(line.split(": ")[:2]): line for line in said.splitlines() if line.startswith("- ")}
        assert "at most 300 steps" in notes["- cola: softmax"]
        assert "seed 5" in notes["- cola: softmax"]
        assert "1000 steps of imitation" in notes["- cola: converted"]
        assert "batch 8" in notes["- rte: converted"]
        assert f"torch {torch.__version__}" in notes["- rte: converted"]
        assert "- rte: steps with labels: softmax 77, hedgehog 77, lot 77." in said

    @pytest.mark.parametrize("method", ["softmax", "hedgehog"], ids=["asked-for", "of-another-column"])
    def test_cells_of_other_settings_are_not_mixed_in(self, store, checkpoint, tmp_path, method):
        store(cell("sst2", method), experiment.GlueSettings(epochs=2.0))
        settings = experiment.GlueSettings(epochs=1.0)
        with pytest.raises(ValueError, match=r"something else .*epochs 2.0 instead of 1.0.*another --out"):
            run(checkpoint, tmp_path, tmp_path / "out", ["sst2"], ["lot"], settings)

    def test_nor_are_cells_of_another_checkpoint_of_the_same_name(self, store, checkpoint, tmp_path):
        store(cell("sst2", "softmax"), experiment.GlueSettings())
        other = tmp_path / "elsewhere" / checkpoint.name
        shutil.copytree(checkpoint, other)
        arguments = (tmp_path, tmp_path / "out", ["sst2"], [], experiment.GlueSettings())
        assert len(run(other, *arguments)) == 1, "the same files at another place are the same"
        weights = other / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"x")
        with pytest.raises(ValueError, match="checkpoint with other contents"):
            run(other, *arguments)

    def test_nor_are_cells_of_other_data(self, store, checkpoint, tmp_path):
        store(cell("sst2", "softmax"), experiment.GlueSettings())
        write(tmp_path / "other" / "glue" / "SST-2", "train", ["sentence\tlabel", "the house\t1"])
        write(tmp_path / "other" / "glue" / "SST-2", "dev", ["sentence\tlabel", "the house\t1"])
        arguments = (tmp_path / "out", ["sst2"], ["lot"], experiment.GlueSettings())
        with pytest.raises(ValueError, match="data with other contents: glue/SST-2"):
            run(checkpoint, tmp_path / "other", *arguments)

    def test_of_a_model_that_scores_nothing_nothing_is_recovered(self, store, checkpoint, tmp_path):
        """A softmax model that names one class only has a Matthews' correlation of zero."""
        brief = experiment.GlueSettings(epochs=1, swap_epochs=0, calibration_steps=2, imitation_steps=0)
        rows = [f"x\t{label}\t\tthe house is red" for label in (0, 1)]
        for split in ("train", "dev"):
            write(tmp_path / "glue" / "CoLA", split, rows)
        made = run(checkpoint, tmp_path, tmp_path / "out", ["cola"], ["lot"], brief)
        assert [(cell.score, cell.recovered) for cell in made] == [(0.0, 100.0), (0.0, None)]
        assert "| lot, % recovered | – | – |" in engine.render(tmp_path / "out").markdown()

    def test_an_interrupted_cell_resumes_to_the_same_score(self, checkpoint, tmp_path):
        sst(tmp_path)
        settings = experiment.GlueSettings(
            epochs=2, swap_epochs=5, batch_size=6, calibration_steps=4, imitation_steps=6, swap_lr=1e-3
        )
        whole = run(checkpoint, tmp_path, tmp_path / "whole", ["sst2"], ["lot"], settings)
        arguments = (checkpoint, tmp_path, tmp_path / "parts", ["sst2"], ["lot"], settings)
        for place, step in (("imitates", 4), ("fine-tuning lot", 3)):

            def interrupt(what: str, now: int, total: int, place: str = place, step: int = step) -> None:
                if place in what and now == step:
                    raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                run(*arguments, interrupt)
        parts = run(*arguments)
        assert [cell.score for cell in parts] == [cell.score for cell in whole]
        assert not list((tmp_path / "parts" / "sst2").glob("*.checkpoint"))

    def test_nor_is_half_trained_work_of_other_settings(self, checkpoint, tmp_path):
        sst(tmp_path)

        def interrupt(what: str, now: int, total: int) -> None:
            raise KeyboardInterrupt

        arguments = (checkpoint, tmp_path, tmp_path / "out", ["sst2"], ["lot"])
        with pytest.raises(KeyboardInterrupt):
            run(*arguments, experiment.GlueSettings(batch_size=6), interrupt)
        with pytest.raises(ValueError, match="batch_size 6 instead of 4"):
            run(*arguments, experiment.GlueSettings(batch_size=4))

    def test_the_command_says_so_and_stops(self, store, checkpoint, tmp_path):
        store(cell("sst2", "softmax"), experiment.GlueSettings(seed=1))
        options = ["--checkpoint", str(checkpoint), "--data-dir", str(tmp_path), "--out", str(tmp_path / "out")]
        result = CliRunner().invoke(app, ["experiment", "glue", "--tasks", "sst2", *options])
        assert result.exit_code == 1
        assert "cells made from something else" in " ".join(result.output.split())


class TestWhatIsMissing:
    def test_a_missing_package_is_noticed_before_the_work(self, checkpoint, tmp_path, monkeypatch):
        sst(tmp_path)
        monkeypatch.setitem(sys.modules, "torchmetrics", None)
        with pytest.raises(ImportError, match=r"GLUE needs torchmetrics: pip install 'lotformer\[text\]'"):
            run(checkpoint, tmp_path, tmp_path / "out", ["sst2"], ["lot"], experiment.GlueSettings())
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        ("data", "message"),
        [(None, "no data folder: pass --data-dir or set LOTFORMER_DATA"), ("empty", "no task in")],
        ids=["no folder", "no task"],
    )
    @pytest.mark.parametrize("name", ["glue", "stsb", "balance"])
    def test_the_error_says_which_data_and_where(self, name, data, message, checkpoint, tmp_path, monkeypatch):
        monkeypatch.delenv("LOTFORMER_DATA", raising=False)
        (tmp_path / "empty").mkdir()
        options = ["--data-dir", str(tmp_path / data)] if data else []
        result = CliRunner().invoke(app, ["experiment", name, "--checkpoint", str(checkpoint), *options])
        assert result.exit_code == 1
        said = " ".join(result.output.split())
        assert (message if name == "glue" or not data else "no stsb train set") in said
        assert "glue/STS-B/train.tsv" in said

    @pytest.mark.parametrize("name", ["glue", "stsb", "balance"])
    def test_the_help_says_it_too(self, name):
        said = CliRunner().invoke(app, ["experiment", name, "--help"], env={"COLUMNS": "300"}).output
        assert "glue/STS-B/train.tsv" in said
        assert "LOTFORMER_DATA" in said


def test_unknown_tasks_and_methods_are_named(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="'sst3' is not one of cola"):
        run(checkpoint, tmp_path, tmp_path, ["sst3"], ["lot"], experiment.GlueSettings())
    with pytest.raises(ValueError, match="'lott' is not one of t2r"):
        run(checkpoint, tmp_path, tmp_path, ["sst2"], ["lott"], experiment.GlueSettings())
