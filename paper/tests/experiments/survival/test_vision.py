"""A vision transformer by prototypes: what is learned from is never scored, and a run resumes stage by stage."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from typer.testing import CliRunner

from lotformer.cli.main import app
from lotformer_paper.experiments import engine
from lotformer_paper.experiments.survival import vision

pytestmark = pytest.mark.small_windows

BRIEF = vision.VisionSettings(
    model="vit_tiny_patch16_224", size=64, classes=3, prototypes=2, calibration_inputs=4, calibration_steps=3,
    kept=(1,), finetune_steps=2, batch_size=2,
)  # fmt: skip


@pytest.fixture
def run(images, checkpoint):
    """The experiment on these weights and images: `run(out, variants, settings)`."""

    def run(out, variants, settings):
        inputs = {"checkpoint": checkpoint, "images": images, "variants": variants}
        return engine.run(vision.EXPERIMENT, settings, out, **inputs)

    return run


def test_no_image_that_is_scored_is_learned_from(images, tmp_path):
    for count, expected in ((2, {"3/0.png", "4/0.png"}), (4, {"3/0.png", "3/1.png", "4/0.png", "4/1.png"})):
        task = vision.VisionTask(tmp_path, images, vision.VisionSettings(classes=3, prototypes=2))
        assert {str(file.relative_to(images)) for file in task.learned_from(count)} == expected
    whole = vision.VisionTask(tmp_path, images, vision.VisionSettings(classes=5, prototypes=2))
    assert {file.name for file in whole.learned_from(99)} == {"0.png", "1.png"}


def test_images_may_be_learned_from_at_another_size(images, tmp_path):
    task = vision.VisionTask(tmp_path, images, dataclasses.replace(BRIEF, size=64, learned_size=32))
    assert {batch.shape[-1] for batch in task.batches(3)} == {32}
    assert {batch.shape[-1] for batch in task.test_batches()} == {64}


def test_a_class_may_be_cut_short(images, tmp_path):
    task = vision.VisionTask(tmp_path, images, dataclasses.replace(BRIEF, per_class=3))
    assert {len(files) for files in task.pictures.classes} == {3}
    none_left = vision.VisionTask(tmp_path, images, dataclasses.replace(BRIEF, per_class=2))
    with pytest.raises(ValueError, match="no image to score"):
        none_left.scores(torch.nn.Identity(), lambda *_: None)
    with pytest.raises(ValueError, match="fewer than 7 neighbours"):
        vision.VisionTask(tmp_path, images, dataclasses.replace(BRIEF, neighbours=7))


def test_prototypes():
    embeddings = torch.nn.functional.normalize(
        torch.tensor([[1.0, 0.1], [0.1, 1], [1, 0.2], [0.2, 1], [1, 0.3]]), dim=-1
    )
    labels, first = torch.tensor([0, 1, 0, 1, 1]), torch.tensor([True, True, False, False, False])
    assert vision.prototype_accuracy(embeddings, labels, first) == pytest.approx(2 / 3)


def test_neighbours_vote():
    """The nearest image alone would be right about the last one only."""
    angles = torch.tensor([0.0, 0.2, 0.25, 1.5, 1.45, 0.21, 1.4])
    embeddings = torch.stack([angles.cos(), angles.sin()], dim=-1)
    labels = torch.tensor([0, 1, 0, 1, 1, 0, 1])
    first = torch.arange(7) < 5
    assert vision.neighbour_accuracy(embeddings, labels, first, 1) == 0.5
    assert vision.neighbour_accuracy(embeddings, labels, first, 3) == 1.0


def test_every_stage_is_scored_once(run, tmp_path):
    cells = run(tmp_path / "out", "lot-32", BRIEF)
    assert [cell.stage for cell in cells] == ["converted", "calibrated", "kept-1", "fine-tuned"]
    assert cells[1].residual_max is not None
    assert cells[1].residual_max < 1e-3
    assert len(cells[1].errors) == 2
    assert cells[2].scores["cosine"] > cells[0].scores["cosine"]
    page = engine.render(tmp_path / "out").markdown()
    assert "lot-32, kept-1" in page
    written = (tmp_path / "out" / "lot-32" / "seed0" / "calibrated.json").stat().st_mtime_ns
    assert run(tmp_path / "out", "lot-32", BRIEF) == cells
    assert (tmp_path / "out" / "lot-32" / "seed0" / "calibrated.json").stat().st_mtime_ns == written


def test_fine_tuning_may_see_more_than_calibration(run, tmp_path, monkeypatch):
    asked, batches = [], vision.VisionTask.batches
    monkeypatch.setattr(vision.VisionTask, "batches", lambda task, count: asked.append(count) or batches(task, count))
    brief = dataclasses.replace(BRIEF, kept=(), finetune_inputs=6)
    run(tmp_path / "out", "lot-32", brief)
    assert asked == [4, 6]
    assert "on 6 unlabelled inputs" in engine.render(tmp_path / "out").markdown()


def test_the_original_is_scored_once_for_all_runs(run, tmp_path, monkeypatch):
    first = run(tmp_path / "out", "lot-32", BRIEF)
    scored = vision.VisionTask.scores
    references = []
    monkeypatch.setattr(
        vision.VisionTask, "scores", lambda task, *args: references.append(task.reference) or scored(task, *args)
    )
    brief = dataclasses.replace(BRIEF, kept=(), finetune_steps=0)
    cells = run(tmp_path / "out", "lot-fixed", brief)
    assert [reference is None for reference in references] == [False, False]  # two stages, no original
    assert cells[0].softmax == first[0].softmax
    (tmp_path / "out" / "softmax.pt").unlink()  # the outputs are not published with the cells
    run(tmp_path / "out", "lot-64", brief)
    assert references[2] is None


def test_seeds_are_cells_of_their_own_and_one_row(run, tmp_path):
    """A second seed can be added later, with fewer stages; what is there is not made again."""
    out = tmp_path / "out"
    first = run(out, "lot-32", BRIEF)
    more = dataclasses.replace(BRIEF, seeds=(0, 1), first_stage="calibrated", kept=())
    cells = run(out, "lot-32", more)
    assert [(cell.seed, cell.stage) for cell in cells] == [
        (seed, stage) for seed in (0, 1) for stage in ("calibrated", "fine-tuned")
    ]
    assert [cell for cell in cells if cell.seed == 0] == [first[1], first[3]]
    assert cells[2].errors != cells[0].errors
    page = engine.render(out).markdown()
    assert page.count("lot-32, calibrated |") == 1
    assert " ± " in next(line for line in page.splitlines() if "lot-32, calibrated" in line)
    assert "lot-32 calibrated (seeds 0, 1)" in page


def test_seeds_of_different_budgets_are_not_averaged(run, tmp_path):
    out = tmp_path / "out"
    first = dataclasses.replace(BRIEF, kept=(), finetune_steps=0, first_stage="calibrated")
    run(out, "lot-32", first)
    run(out, "lot-32", dataclasses.replace(first, seeds=(1,), calibration_steps=2))
    page = engine.render(out).markdown()
    assert page.count("| lot-32, calibrated |") == 2
    assert " ± " not in page


def test_something_must_stay_converted(run, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="the model has 2, got"):
        run(out, "lot-32", dataclasses.replace(BRIEF, kept=(2,)))
    with pytest.raises(ValueError, match="kept"):
        dataclasses.replace(BRIEF, kept=(-1,))


def test_models_may_be_scored_in_half_precision(images, checkpoint, tmp_path):
    exact, half = (
        vision.VisionTask(checkpoint, images, settings)
        for settings in (BRIEF, dataclasses.replace(BRIEF, scored_in="bf16"))
    )
    model = exact.load().eval()
    exact.scores(model, lambda *_: None)
    half.scores(model, lambda *_: None)
    assert half.reference.dtype == torch.float32
    difference = (half.reference - exact.reference).abs().max()
    assert 0 < difference < 0.05


def test_the_command_refuses_what_is_not_there(tmp_path):
    result = CliRunner().invoke(
        app, ["experiment", "survival-vision", "--checkpoint", str(tmp_path), "--images", str(tmp_path)]
    )
    assert result.exit_code == 1
    assert "should hold a folder of images for each class" in result.output
