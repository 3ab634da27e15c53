"""The vision task on the real loop: recipes start, runs resume bit for bit, errors are clear."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import lotformer.models  # noqa: F401  makes torchvision importable

# isort: split
from lotformer.conversion.measuring.couplings import couplings_watched
from lotformer.data.vision.sources import stream_fingerprint
from lotformer.settings import make
from lotformer.training.logs import Progress
from lotformer.training.run import train
from lotformer.vision.batches import StreamedImages, repeated
from lotformer.vision.build import load_trained, load_weights
from lotformer.vision.evaluation import blanked
from lotformer.vision.settings import ImageSettings, VisionSettings, completed, options
from lotformer.vision.task import Vision, evaluate_trained, open_sets
from lotformer_paper.experiments.vision.ablation import images_source
from support.image_folder import make_image_folder

TINY: dict[str, Any] = {
    "model": "lot_vit_half",
    "model_args": ("depth=2", "patch_size=8", "embed_dim=24"),
    "attention_args": ("rank=4",),
    "image_size": (16, 24),
    "batch_size": 6,
    "lr": 3e-3,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_image_folder(tmp_path / "images")


def task(folder: Path, **chosen: Any) -> Vision:
    settings = make(VisionSettings, completed({**TINY, "data": folder, **chosen}))
    return Vision(settings, open_sets(settings))


def test_one_file_is_not_its_own_validation_set(folder):
    """timm would open the same images for both splits of a tar file."""
    packed = shutil.make_archive(str(folder), "tar", folder / "train")
    with pytest.raises(ValueError, match=r"images\.tar is one file without splits.*train/ and val/"):
        open_sets(make(VisionSettings, completed({**TINY, "data": Path(packed)})))


@pytest.mark.parametrize("mixing", ["mixup", "cutmix"])
def test_images_without_a_partner_are_refused_before_the_run(folder, mixing, tmp_path):
    with pytest.raises(ValueError, match="a process loads 3 at once, which must be even"):
        train(task(folder, batch_size=3, steps=1, **{mixing: 0.5}), tmp_path / "out")


class StopAt:
    """Ends a run from outside, after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def started(self, step: int, steps: int) -> None: ...

    def stepped(self, progress: Progress) -> None:
        if progress.step == self.step:
            raise KeyboardInterrupt

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def ended(self) -> None: ...


@pytest.mark.parametrize("recipe", ["deit", "paper"])
def test_the_recipes_for_imagenet_start_on_a_tiny_folder(folder: Path, tmp_path: Path, recipe: str) -> None:
    report = train(task(folder, recipe=recipe, steps=2), tmp_path / "run")
    assert report.steps == 2
    assert set(report.metrics) == {"top1", "top5"}


def test_the_papers_recipe_says_what_the_paper_says() -> None:
    settings = make(VisionSettings, completed({"recipe": "paper"}))
    stated = (settings.epochs, settings.warmup_epochs, settings.batch_size, settings.lr, settings.weight_decay)
    assert stated == (400, 10, 1024, 3e-4, 0.05)
    assert settings.model == "lot_deit_tiny_patch16_224"
    deit = make(VisionSettings, completed({"recipe": "deit"}))
    assert (deit.epochs, deit.warmup_epochs, deit.lr, deit.mixup, deit.cutmix) == (300, 5, 1e-3, 0.8, 1.0)
    assert make(VisionSettings, completed({"epochs": 30.0})).warmup_epochs == pytest.approx(0.5)


def test_it_learns_what_can_be_learned(folder: Path, tmp_path: Path) -> None:
    report = train(task(folder, recipe="none", steps=40), tmp_path / "run")
    assert report.metrics["top1"] == 1.0


@pytest.mark.parametrize("workers", [0, 2])
def test_an_interrupted_run_ends_as_if_it_had_not_been(folder: Path, tmp_path: Path, workers: int) -> None:
    chosen = {"steps": 5, "save_every": 2, "ema": 0.9, "workers": workers}  # with all of DeiT's augmentation
    train(task(folder, **{**chosen, "workers": 0}), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(task(folder, **chosen), tmp_path / "cut", listeners=[StopAt(3)])
    train(task(folder, **chosen), tmp_path / "cut", resume=True)
    whole, cut = (load_trained(tmp_path / name / "best.pt").model.state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def swap_labels(folder: Path) -> None:
    one, two = (folder / "train" / name / "3.png" for name in ("dark", "white"))
    whole = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(whole)


def change_a_byte(file: Path) -> None:
    """Of the pixels; the file keeps its size and its times."""
    before = file.stat()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES: dict[str, Callable[[Path], object]] = {
    "two labels": swap_labels,
    "all labels": lambda folder: [
        (folder / "train" / name).rename(folder / "train" / other)
        for name, other in (("dark", "x"), ("white", "dark"), ("x", "white"))
    ],
    "one image": lambda folder: change_a_byte(folder / "train" / "grey" / "2.png"),
    "one judged image": lambda folder: change_a_byte(folder / "val" / "grey" / "2.png"),
}


@pytest.mark.parametrize("cache", [False, True], ids=["files", "memory"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_run_is_not_resumed_on_other_images(folder: Path, tmp_path: Path, change: str, cache: bool) -> None:
    chosen = {"recipe": "none", "steps": 4, "save_every": 1, "cache": cache}
    with pytest.raises(KeyboardInterrupt):
        train(task(folder, **chosen), tmp_path / "run", listeners=[StopAt(2)])
    moved = folder.rename(tmp_path / "moved")
    CHANGES[change](moved)
    with pytest.raises(ValueError, match=r"last\.pt belongs to another run: data is 24 images of 3 classes, \w{16}"):
        train(task(moved, **chosen), tmp_path / "run", resume=True)


def test_a_run_is_resumed_on_the_same_images_elsewhere(folder: Path, tmp_path: Path) -> None:
    chosen = {"recipe": "none", "steps": 4, "save_every": 1}
    with pytest.raises(KeyboardInterrupt):
        train(task(folder, **chosen), tmp_path / "run", listeners=[StopAt(2)])
    moved = Path(shutil.copytree(folder, tmp_path / "moved"))
    assert train(task(moved, cache=True, **chosen), tmp_path / "run", resume=True).steps == 4


def test_the_cells_of_an_ablation_know_their_images_by_class(folder: Path) -> None:
    image = (folder / "train" / "dark" / "1.png").rename(folder / "train" / "dark" / "one of its name.png")
    before = images_source(folder)
    assert images_source(Path(shutil.copytree(folder, folder.parent / "copy" / folder.name))) == before
    image.rename(folder / "train" / "grey" / image.name)
    assert images_source(folder) != before


def test_streamed_files_are_known_by_content(folder: Path) -> None:
    before = stream_fingerprint("wds/numbers", folder)
    assert before.startswith("wds/numbers, ")
    change_a_byte(folder / "train" / "dark" / "1.png")
    assert stream_fingerprint("wds/numbers", folder) != before
    assert stream_fingerprint("hfids/numbers", folder) == "hfids/numbers"  # a cache of what is far away


def test_broken_images_are_counted_and_named_whoever_loads_them(folder: Path, tmp_path: Path) -> None:
    (folder / "train" / "grey" / "5.png").write_bytes(b"broken")
    (folder / "val" / "dark" / "0.png").write_bytes(b"broken")
    for workers in (0, 1):
        made = task(folder, recipe="none", steps=4, workers=workers)
        train(made, tmp_path / f"run{workers}")
        assert made.broken_files()[0] == "grey/5.png"
    assert "dark/0.png" in task_with_memory(folder).broken_files()


def task_with_memory(folder: Path) -> Vision:
    return task(folder, recipe="none", cache=True)


def test_repeated_augmentation_repeats_images_in_a_row() -> None:
    batches = repeated(10, 4, seed=0, repeats=3)
    drawn = [index for batch in batches(0) for index in batch]
    assert len(drawn) == 8
    assert all(len(set(drawn[start : start + 3])) == 1 for start in (0, 3))
    assert batches(0) == batches(0)
    assert batches(0) != batches(1)


class _Counting(torch.utils.data.IterableDataset):
    def __len__(self) -> int:
        return 7

    def __iter__(self):
        return iter([(torch.full((3, 2, 2), float(index)), index) for index in range(7)])


def test_a_streamed_source_goes_on_where_it_was() -> None:
    def stream(source: Any) -> StreamedImages:
        return StreamedImages(source, 2, None, seed=0, workers=0, described="numbers")

    whole = stream(_Counting())
    drawn = [whole.next().targets.tolist() for _ in range(5)]
    assert drawn == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3]]  # what fills no batch is left out; then from the start
    again = stream(_Counting())
    again.load_state_dict({"drawn": 4})
    assert again.next().targets.tolist() == [2, 3]
    assert again.state_dict() == whole.state_dict()
    with pytest.raises(ValueError, match="less than one batch"):
        StreamedImages(_Counting(), 9, None, seed=0, workers=0, described="").next()


def test_a_trained_model_is_evaluated_with_blank_patches_and_residuals(folder: Path, tmp_path: Path) -> None:
    train(task(folder, recipe="none", steps=40), tmp_path / "run")
    trained = load_trained(tmp_path / "run" / "best.pt")
    judged, broken = evaluate_trained(trained, ImageSettings(data=folder), drop=(0.0, 1.0), patch_size=8)
    assert judged.top1 == trained.metrics["top1"] == judged.dropped["0"] == 1.0
    assert judged.dropped["1"] == pytest.approx(1 / 3)  # every image is blank: one answer for all
    assert list(judged.residuals) == ["blocks.0.attn.mechanism", "blocks.1.attn.mechanism"]
    assert judged.residual is not None
    assert judged.residual < 0.1
    assert broken == []


def test_blanking_takes_the_stated_share_of_every_image() -> None:
    pixels = torch.ones(5, 3, 20, 24)
    blank = blanked(pixels, 0.5, 4, torch.Generator().manual_seed(0))
    assert blank.flatten(1).mean(1).tolist() == pytest.approx([0.5] * 5)
    assert len({tuple(x.flatten().tolist()) for x in blank}) == 5
    torch.testing.assert_close(blanked(pixels, 0.0, 4, torch.Generator()), pixels)


def test_watching_couplings_leaves_the_model_alone(folder: Path) -> None:
    model = task(folder).build_model().eval()
    x = torch.randn(2, 3, 16, 24)
    before = model(x)
    with couplings_watched(model) as residuals:
        torch.testing.assert_close(model(x), before)  # to rounding: a watched layer forms its queries and keys
    assert len(residuals) == 2
    residuals.clear()
    assert torch.equal(model(x), before)
    assert not residuals


def test_the_splits_must_have_the_same_classes(folder: Path) -> None:
    (folder / "val" / "white").rename(folder / "val" / "bright")
    with pytest.raises(ValueError, match="'bright' where training has 'dark'"):
        task(folder)
    for file in (folder / "val" / "bright").iterdir():
        file.unlink()
    with pytest.raises(ValueError, match="has 2 classes and the model 3"):
        task(folder)


def test_a_checkpoint_on_a_set_with_other_classes_is_refused(folder: Path, tmp_path: Path) -> None:
    train(task(folder, recipe="none", steps=1), tmp_path / "run")
    trained = load_trained(tmp_path / "run" / "best.pt")
    for split in ("train", "val"):
        (folder / split / "new").mkdir()
        for file in (folder / split / "dark").iterdir():
            (folder / split / "new" / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ValueError, match="has 4 classes and the model 3"):
        evaluate_trained(trained, ImageSettings(data=folder))


def test_weights_of_another_architecture_are_refused(folder: Path, tmp_path: Path) -> None:
    train(task(folder, recipe="none", steps=1), tmp_path / "run")
    weights = load_trained(tmp_path / "run" / "best.pt").model.state_dict()
    deeper = task(folder, model_args=("depth=3", "patch_size=8", "embed_dim=24")).build_model()
    with pytest.raises(ValueError, match=r"another architecture: blocks\.2\..* is missing; .* and \d+ more"):
        load_weights(deeper, weights, "best.pt")
    with pytest.raises(ValueError, match="belongs to another run"):
        train(
            task(folder, recipe="none", steps=1, attention="softmax", attention_args=()),
            tmp_path / "run",
            resume=True,
        )


def test_what_is_not_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        load_trained(tmp_path / "best.pt")
    torch.save({"weights": {}}, tmp_path / "best.pt")
    with pytest.raises(
        ValueError, match=r"best\.pt is not a checkpoint.* Expected was the best\.pt of `lotformer train vision`"
    ):
        load_trained(tmp_path / "best.pt")


def test_models_and_options_that_do_not_exist_are_named(folder: Path) -> None:
    with pytest.raises(ValueError, match="timm knows no model 'lot_deit'; there are lot_deit_"):
        task(folder, model="lot_deit").build_model()
    with pytest.raises(ValueError, match="cannot be built with"):
        task(folder, attention_args=("ranks=3",)).build_model()
    with pytest.raises(ValueError, match="written name=value"):
        options(["rank"])
    assert options(["rank=16", "solver=newton", "powers=(1, 0.5)"]) == {
        "rank": 16, "solver": "newton", "powers": (1, 0.5),
    }  # fmt: skip


def test_where_images_are_does_not_make_another_run(folder: Path) -> None:
    settings = task(folder).settings
    moved = dataclasses.replace(settings, data=Path("/elsewhere"), cache=True, workers=3)
    assert moved.described() == settings.described()
