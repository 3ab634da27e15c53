"""Table 1: the paper's rows with the paper's recipe, resumable, by one process or by many."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lotformer_paper.experiments import engine
from lotformer_paper.experiments.vision.imagenet import EXPERIMENT, ImageNetSettings
from lotformer_paper.results.paper import TABLE_1
from support.image_folder import make_image_folder

TINY = {"steps": 2, "batch_size": 4, "image_size": 32}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return make_image_folder(tmp_path / "images", train=6, val=2)


def test_the_plan_is_the_papers_table_with_its_recipe(images: Path) -> None:
    jobs = list(EXPERIMENT.plan(ImageNetSettings(), engine.silent, images))
    planned = [origin.settings for job in jobs for origin in job.cells.values()]
    assert [(one["model"], one["attention"]) for one in planned] == [(row.backbone, row.attention) for row in TABLE_1]
    for one in planned:
        assert (one["epochs"], one["warmup_epochs"], one["batch_size"]) == (400, 10, 1024)
        assert (one["lr"], one["weight_decay"], one["image_size"]) == (3e-4, 0.05, [224])
        assert (one["mixup"], one["cutmix"], one["repeats"], one["drop_path"]) == (0.8, 1.0, 3, 0.1)


def test_backbones_are_crossed_with_the_mechanisms_that_are_given(images: Path) -> None:
    settings = ImageNetSettings(epochs=40, recipe="deit", lr=1e-4)
    chosen = {"backbones": "pvt-tiny, deit-small", "mechanisms": "cosformer,lot", "seeds": 2}
    jobs = list(EXPERIMENT.plan(settings, engine.silent, images, **chosen))
    names = [name for job in jobs for name in job.cells]
    assert names[:3] == ["pvt-tiny/cosformer-seed0", "pvt-tiny/lot-seed0", "deit-small/cosformer-seed0"]
    assert len(names) == 8
    [first] = jobs[0].cells.values()
    assert (first.settings["epochs"], first.settings["lr"]) == (40, 1e-4)
    assert first.settings["warmup_epochs"] == pytest.approx(5 * 40 / 300)


@pytest.mark.parametrize(
    ("chosen", "said"), [({"backbones": "deit-huge"}, "deit-small"), ({"mechanisms": "sofmax"}, "softmax")]
)
def test_unknown_names_are_refused_with_those_that_are_known(images: Path, chosen: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        list(EXPERIMENT.plan(ImageNetSettings(), engine.silent, images, **chosen))


def test_a_budget_is_in_epochs_or_in_steps() -> None:
    with pytest.raises(ValueError, match="give epochs or steps, got 1 epochs and 2 steps"):
        ImageNetSettings(epochs=1, steps=2)


def test_an_interrupted_run_goes_on_and_the_papers_numbers_stand_beside(images: Path, tmp_path: Path) -> None:
    out, told = tmp_path / "out", list[str]()

    def interrupt(what: str, now: int, total: int) -> None:
        told.append(what)
        if what.startswith("deit-tiny/lot"):
            raise KeyboardInterrupt

    chosen = {"data": images, "backbones": "deit-tiny", "mechanisms": "softmax,lot"}
    with pytest.raises(KeyboardInterrupt):
        engine.run(EXPERIMENT, ImageNetSettings(**TINY), out, interrupt, **chosen)
    assert (out / "deit-tiny/lot-seed0.begun").exists()
    told.clear()
    softmax, lot = engine.run(EXPERIMENT, ImageNetSettings(**TINY), out, lambda what, *_: told.append(what), **chosen)
    assert not any(what.startswith("deit-tiny/softmax") for what in told)
    assert (softmax.steps, softmax.residual, softmax.epochs) == (2, None, 4 / 9)
    assert lot.residual < 1e-3
    assert lot.minutes is None
    [table] = engine.render(out).tables
    assert [(row[0], row[2]) for row in table.rows] == [("softmax", "72.2"), ("LOTFormer", "74.8")]
    assert "Recipe 'paper'" in engine.render(out).markdown()
    with pytest.raises(ValueError, match="steps 2 instead of 3"):
        engine.run(EXPERIMENT, ImageNetSettings(**{**TINY, "steps": 3}), out, **chosen)


def test_two_processes_make_one_cell(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [name for key, value in TINY.items() for name in (f"--{key.replace('_', '-')}", str(value))]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "lotformer"]
    rows = ["--backbones", "deit-tiny", "--mechanisms", "hydra"]
    command = [*launch, "experiment", "imagenet", "--data", str(images), *rows, *words, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Wrote") == 1
    stored = json.loads((out / "deit-tiny/hydra-seed0.json").read_text())
    assert stored["cell"]["steps"] == 2
    assert {path.name for path in out.rglob("*") if path.suffix in (".json", ".md", ".begun")} == {
        "hydra-seed0.json",
        "table.md",
    }
