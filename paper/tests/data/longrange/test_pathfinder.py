"""Pathfinder: the label decides where one dot lies and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from lotformer_paper.data.longrange import contours
from lotformer_paper.data.longrange.pathfinder import Pathfinder, PathfinderFiles
from lotformer_paper.data.longrange.prepare import prepare
from lotformer_paper.data.longrange.statistics import dot_distance, image_statistics


@pytest.fixture(scope="module")
def shard():
    return Pathfinder(seed=1, sizes={"train": 1200}).make("train", 0)


def test_labels_are_balanced(shard):
    assert np.bincount(shard.labels).tolist() == [600, 600]


def test_shards_are_deterministic():
    twice = [Pathfinder(seed=2, sizes={"train": 3}).make("train", 0) for _ in range(2)]
    assert np.array_equal(np.stack(twice[0].documents), np.stack(twice[1].documents))


def test_two_images_that_differ_in_the_label_differ_in_one_dot():
    one, two = (contours.draw(np.random.default_rng(4), [label] * 20) for label in (1, 0))
    for joined, apart in zip(one, two, strict=True):
        changed = joined != apart
        assert 0 < changed.sum() <= 2 * 9  # a dot covers nine pixels
        brighter = joined.astype(int) > apart
        for place in (brighter, changed & ~brighter):
            y, x = np.nonzero(place)
            assert np.ptp(y, axis=0) <= 2
            assert np.ptp(x, axis=0) <= 2


def test_contours_are_walks_from_their_start_to_their_end():
    drawn = contours._draw_contours(np.random.default_rng(0), 8192)
    assert len(drawn.heads) > 50
    dashes = drawn.heads.reshape(-1, 2, 14)
    assert np.array_equal(dashes[:, :, -1], drawn.ends)
    position = np.stack([dashes // contours._WIDTH, dashes % contours._WIDTH], -1)
    steps = np.linalg.norm(np.diff(position, axis=2), axis=-1)
    assert steps.min() > 1
    assert steps.max() < 8
    start = np.stack([drawn.starts // contours._WIDTH, drawn.starts % contours._WIDTH], -1)
    assert np.linalg.norm(position[:, :, 0] - start, axis=-1).max() < 3.5


def test_dashes_of_different_contours_keep_apart():
    drawn = contours._draw_contours(np.random.default_rng(0), 4096)
    for heads, directions in zip(drawn.heads, drawn.directions, strict=True):
        zones = [set(head + contours._KEEP_OUT[way]) for head, way in zip(heads, directions, strict=True)]
        first, second = set().union(*zones[:14]), set().union(*zones[14:])
        assert not first & second


def test_the_label_cannot_be_read_from_brightness_or_length(shard):
    features = image_statistics(np.stack(shard.documents).reshape(-1, 32, 32))
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=500))
    accuracy = model.fit(features[:600], shard.labels[:600]).score(features[600:], shard.labels[600:])
    assert abs(accuracy - 0.5) < 0.07  # three standard deviations of 600 fair coins


def test_dots_are_found():
    image = np.zeros((1, 32, 32), np.uint8)
    image[0, 3:6, 3:6] = image[0, 23:26, 3:6] = 255
    image[0, 10, :] = 200  # a line is not a dot
    assert dot_distance(image).tolist() == [20]


def release(folder: Path, count: int = 10) -> Path:
    (folder / "imgs" / "0").mkdir(parents=True)
    (folder / "metadata").mkdir()
    lines = []
    for number in range(count):
        name = f"sample_{number}.png"
        Image.fromarray(np.full((32, 32), number, np.uint8)).save(folder / "imgs" / "0" / name)
        lines.append(f"imgs/0 {name} {number} {number % 2} 1.0 14 4 2 0.5 1 1")
    (folder / "metadata" / "0.npy").write_text("\n".join(lines) + "\n")
    return folder


def test_the_release_is_read_and_split(tmp_path):
    source = PathfinderFiles(release(tmp_path / "curv_contour_length_14"))
    parts = {split: source.make(split, 0) for split in ("train", "dev", "test")}
    assert [len(part.labels) for part in parts.values()] == [8, 1, 1]
    for part in parts.values():
        for image, label in zip(part.documents, part.labels, strict=True):
            assert image.shape == (1024,)
            assert image[0] % 2 == label
    assert len({int(image[0]) for part in parts.values() for image in part.documents}) == 10


def test_other_labels_or_pixels_make_another_set(tmp_path):
    folder = release(tmp_path / "curv_contour_length_14")
    source = PathfinderFiles(folder)
    made = {prepare(source, tmp_path, workers=1).fingerprint}
    table = folder / "metadata" / "0.npy"
    swapped = [line.split() for line in table.read_text().splitlines()]
    table.write_text("".join(" ".join([*row[:3], str(1 - int(row[3])), *row[4:]]) + "\n" for row in swapped))
    made.add(prepare(source, tmp_path, workers=1).fingerprint)
    Image.fromarray(np.full((32, 32), 77, np.uint8)).save(folder / "imgs" / "0" / "sample_0.png")
    made.add(prepare(source, tmp_path, workers=1).fingerprint)
    assert len(made) == 3
    moved = PathfinderFiles(folder.rename(tmp_path / "elsewhere"))
    assert prepare(moved, tmp_path, workers=1).fingerprint in made


def test_empty_files_are_left_out(tmp_path):
    folder = release(tmp_path)
    (folder / "imgs" / "0" / "sample_3.png").write_bytes(b"")
    assert PathfinderFiles(folder).describe()["images"] == 9


def test_damage_is_named(tmp_path):
    folder = release(tmp_path)
    image = folder / "imgs" / "0" / "sample_3.png"
    image.write_bytes(image.read_bytes()[:40])
    with pytest.raises(ValueError, match=r"sample_3\.png is not an image, or is damaged"):
        [PathfinderFiles(folder).make(split, 0) for split in ("train", "dev", "test")]
    image.unlink()
    with pytest.raises(FileNotFoundError, match=r"sample_3\.png, which does not exist"):
        PathfinderFiles(folder).describe()
    (folder / "metadata" / "0.npy").write_text("imgs/0 sample_1.png\n")
    with pytest.raises(ValueError, match=r"0\.npy, line 1: expected folder, file, number, label"):
        PathfinderFiles(folder).describe()


def test_a_missing_release_says_what_was_expected(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"metadata/\*\.npy"):
        PathfinderFiles(tmp_path).describe()
