"""What is written appears whole, with the user's permissions; what cannot be written changes nothing."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from lotformer.files import new_file, new_folder, require_writable, write_bytes, write_text


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
        write_bytes("no bytes", path)  # type: ignore[arg-type]
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


DIES_BETWEEN_TWO_RENAMES = """
import os, signal, sys
from pathlib import Path
from lotformer.files import new_folder
rename = Path.rename
def last(self, target):
    rename(self, target)
    os.kill(os.getpid(), signal.SIGKILL)
Path.rename = last
with new_folder(Path(sys.argv[1])) as draft:
    (draft / "weights").write_text("new")
"""

WAITS = """
import sys
from pathlib import Path
from lotformer.files import new_folder
with new_folder(Path(sys.argv[1])) as draft:
    (draft / "weights").write_text("slow")
    print("begun", flush=True)
    sys.stdin.read()
"""

needs_signals = pytest.mark.skipif(os.name != "posix", reason="kill -9")


@needs_signals
def test_a_folder_whose_replacement_was_killed_comes_back(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights").write_text("old")
    process = subprocess.run([sys.executable, "-c", DIES_BETWEEN_TWO_RENAMES, str(folder)])
    assert process.returncode == -signal.SIGKILL
    assert not folder.exists()
    with new_folder(folder) as draft:
        assert (folder / "weights").read_text() == "old"
        (draft / "weights").write_text("newer")
    assert (folder / "weights").read_text() == "newer"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@needs_signals
def test_drafts_are_swept_when_their_process_is_gone_and_not_before(tmp_path):
    folder = tmp_path / "model"
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    with new_folder(folder) as draft:
        (draft / "weights").write_text("quick")
    assert len(list(tmp_path.iterdir())) == 2
    process.kill()
    process.communicate()
    with new_folder(folder) as draft:
        (draft / "weights").write_text("last")
    assert (folder / "weights").read_text() == "last"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_no_folder_replaces_a_link_or_a_file(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").write_text("mine")
    for name, kind in (("link", "a link to"), ("file", "a file")):
        with pytest.raises(FileExistsError, match=f"{name} is {kind}"), new_folder(tmp_path / name):
            pass
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "mine"


def test_a_place_that_cannot_be_written_is_named_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write to .*file/out: .*another --out"):
        require_writable(tmp_path / "file" / "out")
    require_writable(tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())
