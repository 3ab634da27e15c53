"""Prepared sets: deterministic, resumable, complete or absent, damage named."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from lotformer_paper.data.longrange.listops import ListOps
from lotformer_paper.data.longrange.prepare import prepare
from lotformer_paper.data.longrange.store import open_set
from support import forked

SOURCE = ListOps(seed=5, shortest=5, longest=60, sizes={"train": 2100, "dev": 30})


def contents(prepared) -> list[tuple[list[int], int]]:
    return [
        (example.documents[0].tolist(), example.label)
        for split in (prepared["train"], prepared["dev"])
        for example in split.__getitems__(range(len(split)))
    ]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare(SOURCE, tmp_path_factory.mktemp("once"), workers=1)


def test_a_set_holds_what_its_shards_hold(prepared):
    expected = [
        (tokens.tolist(), int(label))
        for split, count in SOURCE.shards().items()
        for number in range(count)
        for shard in [SOURCE.make(split, number)]
        for tokens, label in zip(shard.documents, shard.labels, strict=True)
    ]
    assert contents(prepared) == expected
    assert prepared["train"].lengths()[:5].tolist() == [len(tokens) for tokens, _ in expected[:5]]


def test_two_processes_make_the_same_set_as_one(prepared, tmp_path):
    assert prepare(SOURCE, tmp_path, workers=2).fingerprint == prepared.fingerprint


def test_another_seed_is_another_set(prepared, tmp_path):
    other = ListOps(seed=6, shortest=5, longest=60, sizes=SOURCE.sizes)
    made = prepare(other, tmp_path, workers=1)
    assert made.folder.name != prepared.folder.name
    assert made.fingerprint != prepared.fingerprint


def test_an_interrupted_run_goes_on_with_what_is_missing(prepared, tmp_path):
    place = tmp_path / prepared.folder.name

    def interrupt(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(SOURCE, tmp_path, workers=1, listener=interrupt)
    assert not place.exists()
    seen: list[tuple[int, int]] = []
    again = prepare(SOURCE, tmp_path, workers=1, listener=lambda *now: seen.append(now))
    assert seen == [(2, 4), (3, 4), (4, 4)]
    assert again.fingerprint == prepared.fingerprint
    assert [path.name for path in tmp_path.iterdir()] == [place.name]


def die_on_the_way(folder: Path) -> None:
    def kill(done: int, total: int) -> None:
        if done == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    prepare(SOURCE, folder, workers=1, listener=kill)


def test_a_killed_run_leaves_no_set_and_is_continued(prepared, tmp_path):
    assert forked.run(die_on_the_way, tmp_path) == -signal.SIGKILL
    with pytest.raises(FileNotFoundError, match="not a prepared set"):
        open_set(tmp_path / prepared.folder.name)
    assert prepare(SOURCE, tmp_path, workers=1).fingerprint == prepared.fingerprint


def test_a_set_that_is_there_is_not_made_again(prepared):
    def never(done: int, total: int) -> None:
        raise AssertionError("made again")

    assert prepare(SOURCE, prepared.folder.parent, listener=never).fingerprint == prepared.fingerprint


def test_a_set_published_by_another_process_meanwhile_stays(prepared, tmp_path):
    def overtake(done: int, total: int) -> None:
        if done == 1:
            prepare(SOURCE, tmp_path, workers=1)  # removes the shards under our feet

    assert prepare(SOURCE, tmp_path, workers=1, listener=overtake).fingerprint == prepared.fingerprint


@pytest.mark.parametrize("name", ["tokens", "labels"])
def test_a_damaged_array_is_named(tmp_path, name):
    folder = prepare(SOURCE, tmp_path, workers=1).folder
    path = folder / "train" / f"{name}.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=rf"train/{name}\.npy is damaged"):
        prepare(SOURCE, tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match=rf"train/{name}\.npy is missing"):
        open_set(folder)


def test_a_damaged_or_foreign_manifest_is_named(tmp_path):
    folder = prepare(SOURCE, tmp_path, workers=1).folder
    manifest = folder / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text[:40])
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        open_set(folder)
    manifest.write_text(json.dumps({**json.loads(text), "format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        open_set(folder)


def test_an_unknown_split_is_refused_with_those_that_exist(prepared):
    with pytest.raises(KeyError, match="dev, train"):
        prepared["valid"]


def test_arrays_are_memory_mapped(prepared):
    assert isinstance(prepared["train"]._tokens, np.memmap)


def test_files_follow_the_umask(tmp_path):
    old = os.umask(0o022)
    try:
        folder: Path = prepare(SOURCE, tmp_path, workers=1).folder
    finally:
        os.umask(old)
    assert folder.stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*.npy")} == {0o644}
