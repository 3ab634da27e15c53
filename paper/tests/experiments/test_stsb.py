"""STS-B: what is learned from, what is scored on, and a run that resumes stage by stage."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner

from lotformer.cli.main import app
from lotformer.conversion.hosts.sites import converted
from lotformer.data import glue
from lotformer_paper.experiments import engine, stsb
from support.word_encoder import save_word_encoder

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "green", "blue", "old", "house", "tree", "river", "is"]
BRIEF = stsb.StsbSettings(rank=3, calibration_texts=17, calibration_steps=6, finetune_steps=5, batch_size=4)


def sentences(start: int) -> list[str]:
    return [f"{a} {b} is {c}" for a in WORDS[start : start + 3] for b in WORDS[9:12] for c in WORDS[5:9] if a != c]


@pytest.fixture
def data(tmp_path) -> Path:
    folder = tmp_path / "glue" / "STS-B"
    folder.mkdir(parents=True)
    for split, texts in (("train", sentences(5)), ("dev", sentences(6)[-14:])):
        pairs = zip(texts, texts[3:] + texts[:3], strict=True)
        rows = [f"{a}\t{b}\t{5 * i / len(texts):.2f}" for i, (a, b) in enumerate(pairs)]
        (folder / f"{split}.tsv").write_text("\n".join(["sentence1\tsentence2\tscore", *rows]))
    return tmp_path


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    return save_word_encoder(tmp_path / "checkpoint", WORDS, initializer_range=0.3)


@pytest.fixture
def run(checkpoint, data):
    """The experiment on this checkpoint and these data: `run(out, variants, settings, listen)`."""

    def run(out, variants, settings, listen=engine.silent):
        return engine.run(
            stsb.EXPERIMENT, settings, out, listen, checkpoint=checkpoint, data_dir=data, variants=", ".join(variants)
        )

    return run


class TestTextsToLearnFrom:
    def test_are_spread_over_the_training_set_and_never_in_dev(self):
        train = [glue.Example((f"a{i}", f"b{i}"), 0.0) for i in range(10)]
        train += [glue.Example(("a0", "held"), 0.0)]
        dev = [glue.Example(("held", "b9"), 0.0)]
        assert stsb.calibration_texts(train, dev, 5) == ["a0", "b1", "b3", "b5", "b7"]
        assert len(stsb.calibration_texts(train, dev, 999)) == 19

    def test_there_must_be_some(self):
        same = [glue.Example(("a", "b"), 0.0)]
        with pytest.raises(ValueError, match="nothing to learn from"):
            stsb.calibration_texts(same, same, 5)


def test_pairs_are_scored_by_rank_correlation_on_each_part():
    pairs = stsb.SentencePairs([glue.Example(("", ""), float(label)) for label in (0, 1, 2, 1, 0)])
    angles = torch.tensor([1.5, 1.0, 0.5, 0.2, 0.1])
    unit = torch.stack([torch.tensor([1.0, 0.0]).expand(5, 2), torch.stack([angles.cos(), angles.sin()], -1)], 1)
    scores = {name: pairs.spearman(unit, part) for name, part in pairs.parts().items()}
    assert scores["first half"] == pytest.approx(1.0)
    assert scores["second half"] == pytest.approx(-1.0)
    assert scores["all"] == pytest.approx(0.0, abs=1e-6)


def test_every_stage_of_every_variant_is_scored_on_the_halves_and_on_all(run, tmp_path):
    cells = run(tmp_path / "out", ["lot", "lot-uniform"], BRIEF)
    assert [(c.variant, c.stage) for c in cells] == [(v, s) for v in ("lot", "lot-uniform") for s in stsb.STAGES]
    for cell in cells:
        assert [score.pairs for score in cell.scores.values()] == [7, 7, 14]
        for score in cell.scores.values():
            assert score.recovered == pytest.approx(100 * score.spearman / score.softmax)
        halves = [cell.scores[part].cosine for part in ("first half", "second half")]
        assert cell.scores["all"].cosine == pytest.approx(sum(halves) / 2, abs=1e-5)
        assert cell.residual_max < 1e-4
        assert (cell.doubly_stochastic_max < 1e-4) == (cell.variant == "lot-uniform")
    assert len({tuple(score.softmax for score in cell.scores.values()) for cell in cells}) == 1
    by_stage = {cell.stage: cell.scores["all"].cosine for cell in cells if cell.variant == "lot"}
    assert by_stage["calibrated"] > by_stage["converted"]
    saved = transformers.AutoModel.from_pretrained(tmp_path / "out" / "lot" / "fine-tuned")
    assert len(converted(saved)) == 1


class TestResuming:
    def test_an_interrupted_run_ends_where_an_uninterrupted_one_does(self, run, tmp_path):
        whole = run(tmp_path / "whole", ["lot"], BRIEF)

        def interrupt(what: str, now: int, total: int) -> None:
            if what == "lot: fine-tuning without labels" and now == 3:
                signal.raise_signal(signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "parts", ["lot"], BRIEF, interrupt)
        done: list[str] = []
        parts = run(tmp_path / "parts", ["lot"], BRIEF, lambda what, *_: done.append(what))
        assert [cell.scores for cell in parts] == [cell.scores for cell in whole]
        assert "lot: calibrating" not in done
        assert parts[-1].seconds is None, "a time that misses a part is no time"

    def test_finished_cells_are_read_not_run(self, run, tmp_path):
        out = tmp_path / "out"
        first = run(out, ["lot"], BRIEF)
        done: list[str] = []
        assert run(out, ["lot"], BRIEF, lambda what, *_: done.append(what)) == first
        assert not done

    def test_fine_tuning_can_be_added_later_but_calibration_not_changed(self, run, tmp_path):
        out = tmp_path / "out"
        without = stsb.StsbSettings(rank=3, calibration_texts=17, calibration_steps=6, finetune_steps=0, batch_size=4)
        assert [cell.stage for cell in run(out, ["lot"], without)] == ["converted", "calibrated"]
        assert len(run(out, ["lot"], BRIEF)) == 3
        other = stsb.StsbSettings(rank=3, calibration_texts=17, calibration_steps=7, batch_size=4)
        with pytest.raises(ValueError, match=r"calibration_steps 6 instead of 7.*Choose another --out"):
            run(out, ["lot-uniform"], other)


class TestCommand:
    def test_writes_a_table_that_names_its_budget_and_a_record_with_its_origin(self, checkpoint, data, tmp_path):
        out = tmp_path / "out"
        options = {"checkpoint": checkpoint, "data-dir": data, "out": out, "variants": "lot", "rank": 3, "seed": 4}
        options |= {"calibration-texts": 9, "calibration-steps": 2, "finetune-steps": 0, "batch-size": 4}
        arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
        result = CliRunner().invoke(app, ["experiment", "stsb", *arguments])
        assert result.exit_code == 0, result.output
        table = (out / "table.md").read_text()
        for said in ("7 pairs", "| lot, calibrated |", "2 steps on 9 texts", "seed 4", f"torch {torch.__version__}"):
            assert said in table, said
        for stage in ("converted", "calibrated"):
            record = json.loads((out / "lot" / f"{stage}.json").read_text())
            assert record["provenance"]["seed"] == 4
            assert record["provenance"]["cores"] >= 1
            assert record["provenance"]["versions"]["transformers"] == transformers.__version__
            assert set(record["origin"]["sources"]) == {"checkpoint", "data"}

    def test_an_unknown_variant_and_a_missing_set_are_one_clear_error(self, checkpoint, tmp_path):
        common = ["--checkpoint", str(checkpoint), "--data-dir", str(tmp_path), "--out", str(tmp_path / "out")]
        for options, message in ((["--variants", "lott"], "'lott' is not one of lot"), ([], "no stsb train set")):
            result = CliRunner().invoke(app, ["experiment", "stsb", *common, *options])
            assert result.exit_code == 1
            assert message in " ".join(result.output.split())
