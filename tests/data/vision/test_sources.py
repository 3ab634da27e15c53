"""Images through timm: folders, Hugging Face, CIFAR-10; broken files are skipped and named."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import lotformer.models  # noqa: F401  makes torchvision importable

# isort: split
from lotformer.data.vision.cache import decoded
from lotformer.data.vision.sources import open_images, open_stream
from lotformer.data.vision.transforms import Augmentation, evaluation_transform, training_transform
from lotformer.training.random_state import isolated
from support.image_folder import CLASSES, make_image_folder

MODEL = {"interpolation": "bicubic", "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_image_folder(tmp_path / "images")


def test_a_folder_gives_images_labels_and_names(folder: Path) -> None:
    images = open_images("", folder, "train")
    assert len(images) == 24
    assert images.classes == list(CLASSES)
    image, label = images[0]
    assert (image.mode, image.size, label) == ("RGB", (24, 20), 0)
    assert [images[i][1] for i in range(24)] == [0] * 8 + [1] * 8 + [2] * 8
    assert images.name(9) == "grey/1.png"
    assert len(open_images("", folder, "validation")) == 12


@pytest.mark.parametrize("damage", ["empty", "text", "cut"])
def test_a_broken_image_is_skipped_and_named(folder: Path, damage: str) -> None:
    file = folder / "train" / "grey" / "3.png"
    whole = file.read_bytes()
    file.write_bytes({"empty": b"", "text": b"not an image", "cut": whole[: len(whole) // 2]}[damage])
    images = open_images("", folder, "train")
    _, label = images[11]
    assert label == 1  # of its neighbour
    assert [images.name(index) for index in images.broken] == ["grey/3.png"]


def test_a_set_of_nothing_but_broken_images_is_refused(folder: Path) -> None:
    for file in folder.rglob("*.png"):
        file.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="cannot be decoded"):
        open_images("", folder, "train")[0]


def test_a_missing_folder_and_an_empty_one_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"does not exist: --data expects a folder that holds train/ and val/"):
        open_images("", tmp_path / "nowhere", "train")
    with pytest.raises(FileNotFoundError, match="give the folder"):
        open_images("", None, "train")
    (tmp_path / "train").mkdir()
    with pytest.raises(ValueError, match=r"split 'train': Found 0 images"):
        open_images("", tmp_path, "train")


def test_a_decoded_set_is_the_same_and_reads_no_more_files(folder: Path) -> None:
    (folder / "train" / "white" / "0.png").write_bytes(b"broken")
    images = open_images("", folder, "train")
    expected = [(np.asarray(image).copy(), label) for image, label in (images[i] for i in range(len(images)))]
    cached = decoded(open_images("", folder, "train"))
    assert [cached.name(index) for index in cached.broken] == ["white/0.png"]
    for file in folder.rglob("*.png"):
        file.unlink()
    for index, (pixels, label) in enumerate(expected):
        image, got = cached[index]
        assert got == label
        np.testing.assert_array_equal(np.asarray(image), pixels)


def test_hugging_face_data_sets(folder: Path, tmp_path: Path) -> None:
    images = open_images(f"hfds/{folder}", tmp_path / "cache", "train")
    assert images.classes == list(CLASSES)
    assert len(images) == 24
    assert {images[i][1] for i in range(24)} == {0, 1, 2}


def test_cifar_10_in_its_public_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import CIFAR10

    place = tmp_path / CIFAR10.base_folder
    place.mkdir()
    rng = np.random.default_rng(0)
    for name, _ in (*CIFAR10.train_list, *CIFAR10.test_list):
        content = {"data": rng.integers(0, 255, (4, 3072), dtype=np.uint8), "labels": [3, 1, 4, 1]}
        (place / name).write_bytes(pickle.dumps(content))
    (place / CIFAR10.meta["filename"]).write_bytes(pickle.dumps({"label_names": [f"class{i}" for i in range(10)]}))
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)  # these are not the real files
    images = open_images("torch/cifar10", tmp_path, "train")
    assert len(images) == 20
    assert len(images.classes) == 10
    assert images[0][0].size == (32, 32)
    assert images[2][1] == 4


def test_streamed_sources_are_streamed(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="can only be streamed"):
        open_images(f"hfids/{folder}", tmp_path, "train")
    with pytest.raises(ValueError, match="wds/x, split 'train': Please install webdataset"):
        open_stream("wds/x", folder, "train", batch_size=2, training=True, seed=0)


def test_transforms_are_functions_of_the_seed(folder: Path) -> None:
    image, _ = open_images("", folder, "train")[0]
    augmentation = Augmentation(color_jitter=0.3, randaugment="rand-m9-mstd0.5-inc1", erasing=0.5)
    transform = training_transform((16, 24), augmentation, **MODEL)
    made = []
    for seed in (1, 1, 2):
        with isolated(seed):
            made.append(transform(image))
    assert made[0].shape == (3, 16, 24)
    torch.testing.assert_close(made[0], made[1], rtol=0, atol=0)
    assert not torch.equal(made[0], made[2])
    evaluated = evaluation_transform((16, 24), 1.0, **MODEL)
    torch.testing.assert_close(evaluated(image), evaluated(image), rtol=0, atol=0)
    assert evaluated(image).shape == (3, 16, 24)


def test_broken_is_noted_once_per_file(folder: Path) -> None:
    (folder / "train" / "dark" / "7.png").write_bytes(b"")
    images = open_images("", folder, "train")
    for _ in range(3):
        images[7]
    assert images.broken == {7}
