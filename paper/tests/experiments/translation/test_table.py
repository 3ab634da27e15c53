"""The table of translation: every cell once, resumable, with nothing but the encoder's attention changed."""

from __future__ import annotations

import dataclasses
import functools
import json

import pytest
import torch
from typer.testing import CliRunner

from lotformer.cli.main import app
from lotformer_paper.experiments import engine
from lotformer_paper.experiments.translation import conversions, speed, table
from lotformer_paper.experiments.translation.rows import ROWS
from lotformer_paper.models.translation import build
from support import toy_language


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    toy_language.write(folder, train=150, scored=12)
    return folder


def settings(**chosen) -> table.TableSettings:
    base = dataclasses.asdict(toy_language.settings(steps=3))
    return table.TableSettings(
        **{
            **base,
            "bases": ("transformer",),
            "rows": ("softmax", "sinkformer", "lot"),
            "calibration_steps": 2,
            "calibration_pairs": 20,
            "finetuning_steps": 2,
            "scored": 4,
            **chosen,
        }
    )


run = functools.partial(engine.run, table.EXPERIMENT)


def test_cells_are_made_once_and_rendered_as_in_the_paper(data, tmp_path):
    out, runs = tmp_path / "out", tmp_path / "runs"
    cells = run(settings(stages=("swapped",)), out, data_dir=data, runs=runs)
    assert [(cell.row, cell.stage) for cell in cells] == [(row, "swapped") for row in ("softmax", "sinkformer", "lot")]
    stamps = {path.name: path.stat().st_mtime_ns for path in out.glob("*.json")}
    every = run(settings(), out, data_dir=data, runs=runs)
    assert [(cell.row, cell.stage) for cell in every] == [
        ("softmax", "swapped"), ("softmax", "fine-tuned"), ("sinkformer", "swapped"), ("sinkformer", "fine-tuned"),
        ("lot", "swapped"), ("lot", "calibrated"), ("lot", "fine-tuned"),
    ]  # fmt: skip
    assert stamps == {name: (out / name).stat().st_mtime_ns for name in stamps}
    transported = [cell for cell in every if cell.row != "softmax"]
    assert all(cell.column_error is not None and cell.doubly_stochastic_error is not None for cell in transported)
    assert all("tok:13a" in cell.bleu_signature for cell in every)
    assert {path.suffix for path in out.iterdir()} == {".json"}

    page = engine.render(out).markdown()
    assert "| Transformer | lot |" in page
    assert "column error" in page
    assert str(tmp_path) not in json.dumps([json.loads(path.read_text()) for path in out.glob("*.json")])
    with pytest.raises(ValueError, match="finetuning_steps 2 instead of 9"):
        run(settings(finetuning_steps=9), out, data_dir=data, runs=runs)
    with pytest.raises(ValueError, match=r"belongs to another run: settings\.lr"):
        run(settings(lr=0.25), tmp_path / "other", data_dir=data, runs=runs)


def test_a_checkpoint_takes_the_place_of_a_base(data, tmp_path):
    torch.manual_seed(0)
    pairs = toy_language.pairs(data)
    place = tmp_path / "opus"
    build("diff", "tiny", vocabulary=len(pairs.tokenizer)).save_pretrained(place)
    pairs.tokenizer.save_pretrained(place)
    chosen = settings(base=place, rows=("espformer",), stages=("swapped",))
    (cell,) = run(chosen, tmp_path / "out", data_dir=data, runs=tmp_path / "runs")
    assert (cell.base, cell.row) == ("opus", "espformer")
    assert not (tmp_path / "runs").exists()


def test_both_encoders_decode_both_workloads(data, tmp_path):
    pairs = toy_language.pairs(data)
    build("transformer", "tiny", vocabulary=len(pairs.tokenizer)).save_pretrained(tmp_path / "model")
    pairs.tokenizer.save_pretrained(tmp_path / "model")
    small = speed.SpeedSettings(
        row="lot", sentences=5, documents=2, document_tokens=30, document_output=3, beams=2, repeats=1
    )
    inputs = {"model": tmp_path / "model", "text": data / "test.xx"}
    cells = engine.run(speed.EXPERIMENT, small, tmp_path / "out", **inputs)
    assert [(cell.workload, cell.encoder, cell.texts) for cell in cells] == [
        ("sentences", "softmax", 5), ("sentences", "lot", 5), ("documents", "softmax", 2), ("documents", "lot", 2),
    ]  # fmt: skip
    assert [cell.source_tokens for cell in cells[2:]] == [30, 30]
    assert all(cell.said <= 3 for cell in cells[2:])
    assert engine.run(speed.EXPERIMENT, small, tmp_path / "out", **inputs) == cells
    assert "translations per second" in engine.render(tmp_path / "out").markdown()


def test_a_swap_that_touches_anything_else_is_an_error(monkeypatch):
    model = build("transformer", "tiny", vocabulary=20, positions=16)
    convert = conversions.conversion.convert

    def careless(model, *args, **options):
        report = convert(model, *args, **options)
        with torch.no_grad():
            model.model.decoder.layers[0].encoder_attn.q_proj.weight[0, 0] += 1e-6
        return report

    monkeypatch.setattr(conversions.conversion, "convert", careless)
    with pytest.raises(RuntimeError, match=r"untouched differ: model\.decoder\.layers\.0\.encoder_attn"):
        conversions.swap(model, ROWS["lot"], seed=0)


def test_unknown_rows_and_stages_are_refused():
    with pytest.raises(ValueError, match="rows must be among"):
        settings(rows=("performer",))
    with pytest.raises(ValueError, match="stages must be among"):
        settings(stages=("trained",))


def test_the_command_line_prepares_trains_and_translates(data, tmp_path):
    invoke = CliRunner().invoke
    files = ["--corpora", "files", "--prefixes", "train,valid,test", "--source", "xx", "--target", "yy"]
    files += ["--vocabulary", "60", "--data-dir", str(data)]
    prepared = invoke(app, ["data", "prepare", "translation", *files])
    assert prepared.exit_code == 0, prepared.output
    assert "valid 12, test 12" in prepared.output.replace("\n", " ")
    steps = ["--steps", "2", "--size", "tiny", "--max-tokens", "256", "--evaluated", "2", "--beams", "1"]
    trained = invoke(app, ["train", "translation", *files, *steps, "--out", str(tmp_path / "run")])
    assert trained.exit_code == 0, trained.output
    assert "Test: BLEU" in trained.output
    command = ["translate", str(tmp_path / "run" / "model"), "--beams", "2"]
    said = invoke(app, command, input="ba de\n\ngi ko\n")
    assert said.exit_code == 0, said.output
    assert len(said.stdout.splitlines()) == 3
    (tmp_path / "text").write_bytes(b"ba\n\xff\n")
    refused = invoke(app, [*command, str(tmp_path / "text")])
    assert refused.exit_code == 1
    assert "line 2: not UTF-8" in refused.output.replace("\n", " ")
    nowhere = invoke(app, ["translate", str(tmp_path), str(data / "test.xx")])
    assert nowhere.exit_code == 1
    assert "no translation model that can be read" in nowhere.output.replace("\n", " ")
