"""The ablations with the paper's recipe; without it they are what they were."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from lotformer.settings import make
from lotformer_paper.experiments import engine
from lotformer_paper.experiments.registry import EXPERIMENTS
from lotformer_paper.experiments.vision import ablation, ladder
from support.image_folder import make_image_folder

NAMES = ("vision-ladder", "sinkhorn-ablation", "rank-ablation")
RESULTS = Path(__file__).parents[4] / "results"
TINY = {"depth": 1, "image_size": 16, "patch_size": 8, "rank": 4, "batch_size": 6, "epochs": 1}


def settings(name: str, **chosen: object) -> ablation.AblationSettings:
    """As the command makes them."""
    return make(ablation.AblationSettings, EXPERIMENTS[name].completed(chosen))


@pytest.mark.parametrize("name", NAMES)
def test_the_papers_recipe_is_that_of_its_appendix(name: str) -> None:
    made = settings(name, recipe="paper")
    assert made.model == ("lot_vit_half" if name == "sinkhorn-ablation" else "lot_deit_tiny_patch16_224")
    vision = ablation._vision(made, ablation.Row(), 0, Path())
    assert (vision.epochs, vision.warmup_epochs, vision.batch_size, vision.size) == (400, 10, 1024, (224, 224))
    assert (vision.lr, vision.weight_decay, vision.final_lr) == (3e-4, 0.05, 0.033)
    assert (vision.mixup, vision.cutmix, vision.erasing, vision.repeats) == (0.8, 1.0, 0.25, 3)
    assert (vision.randaugment, vision.crop_scale) == ("rand-m9-mstd0.5-inc1", (0.08, 1.0))


def test_what_is_given_wins_and_the_warm_up_follows_the_epochs() -> None:
    made = settings("vision-ladder", recipe="paper", epochs=10, image_size=128, lr=1e-3, model="lot_vit_half")
    vision = ablation._vision(made, ablation.Row(), 0, Path())
    assert (vision.epochs, vision.warmup_epochs) == (10, 0.25)
    assert (vision.size, vision.lr, vision.model) == ((128, 128), 1e-3, "lot_vit_half")
    assert vision.cutmix == 1.0


@pytest.mark.parametrize("name", NAMES)
def test_cells_that_are_published_are_those_of_the_default_recipe(name: str, tmp_path: Path) -> None:
    images = make_image_folder(tmp_path / "images", train=1, val=1)
    for path in sorted((RESULTS / name).glob("*.json")):
        stored = json.loads(path.read_text())["origin"]["settings"]
        own = {field.name for field in dataclasses.fields(ablation.AblationSettings)}
        chosen = {key: value for key, value in stored.items() if key in own}
        row = path.stem.rpartition("-seed")[0]
        [*_, job] = EXPERIMENTS[name].plan(
            settings(name, **chosen), engine.silent, images, seeds=stored["seed"] + 1, rows=row
        )
        [origin] = job.cells.values()
        assert json.loads(json.dumps(origin.settings)) == stored


def test_the_table_names_the_recipe_and_its_cells_are_no_others(tmp_path: Path) -> None:
    images, out = make_image_folder(tmp_path / "images", train=6, val=2), tmp_path / "out"
    chosen = {"data": images, "seeds": 1, "rows": "softmax"}
    made = settings("vision-ladder", recipe="paper", **TINY)
    [cell] = engine.run(ladder.EXPERIMENT, made, out, **chosen)
    assert (cell.steps, cell.epochs) == (3, 1)
    assert cell.forward_ms > 0
    [note] = [note for note in engine.render(out).notes if "peak lr" in note]
    assert note.startswith("The paper's recipe: 1 epoch of images at 16 px")
    assert "mixup" in note
    with pytest.raises(ValueError, match="made from something else"):
        engine.run(ladder.EXPERIMENT, dataclasses.replace(made, recipe="short"), out, **chosen)
