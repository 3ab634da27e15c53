"""What is written appears whole, with the user's permissions; what cannot be written changes nothing."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from lotformer._files import new_file, new_folder, require_writable, write_json, write_text


@pytest.fixture(params=[0o022, 0o077, 0o002], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_files_have_the_permissions_of_the_umask(umask, tmp_path):
    write_text("x", tmp_path / "a" / "file.txt")
    assert mode(tmp_path / "a" / "file.txt") == 0o666 & ~umask


def test_so_has_a_file_that_others_wrote(umask, tmp_path):
    with new_file(tmp_path / "weights") as draft:
        draft.touch(0o600)
    assert mode(tmp_path / "weights") == 0o666 & ~umask


def test_so_have_files_that_others_wrote_into_a_folder(umask, tmp_path):
    with new_folder(tmp_path / "model") as draft:
        (draft / "weights").touch(0o600)
    assert mode(tmp_path / "model" / "weights") == 0o666 & ~umask
    assert mode(tmp_path / "model") == 0o777 & ~umask


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "old.json"
    path.write_text("{}")
    with pytest.raises(TypeError):
        write_json({"not": "a dataclass"}, path)
    assert path.read_text() == "{}"
    assert [file.name for file in tmp_path.iterdir()] == ["old.json"]


def test_a_full_disk_leaves_the_old_file_and_no_draft(tmp_path, monkeypatch):
    path = tmp_path / "old.txt"
    path.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_text("new", path)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["old.txt"]


def test_a_folder_that_fails_on_the_way_leaves_the_old_one(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights").write_text("old")

    def fail() -> None:
        with new_folder(folder) as draft:
            (draft / "weights").write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (folder / "weights").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    with new_folder(folder) as draft:
        (draft / "other").write_text("new")
    assert [path.name for path in folder.iterdir()] == ["other"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_place_that_cannot_be_written_is_named_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write to .*file/out: .*another --out"):
        require_writable(tmp_path / "file" / "out")
    require_writable(tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())
