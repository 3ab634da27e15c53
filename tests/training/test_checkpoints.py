"""The file of a checkpoint is whole whatever happens, belongs to one run, and is refused if a bit of it changed."""

from __future__ import annotations

import os
import random
import shutil
import stat
import time
from pathlib import Path

import pytest
import torch

from lotformer.training import checkpoints
from lotformer.training.checkpoints import Checkpoint
from lotformer.training.run import BEST, LAST, train
from support import forked
from support.full_disk import full_disk, needs_limits
from support.torture import ToySettings, ToyTask

OWNER = {"kind": "test", "settings": {"lr": 0.1, "steps": 5}}


def test_what_is_written_is_read(tmp_path):
    checkpoint = Checkpoint(tmp_path / "run.pt", OWNER)
    assert checkpoint.read() is None
    for step in (1, 2):
        checkpoint.write({"step": step, "weights": torch.arange(step)})
    state = checkpoint.read()
    assert state is not None
    assert state["step"] == 2
    assert torch.equal(state["weights"], torch.arange(2))
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({**OWNER, "settings": {"lr": 0.2, "steps": 5}}, r"settings.lr is 0.2 here and 0.1 there"),
        ({**OWNER, "data": "abc"}, r"data is abc here and absent there"),
        ({f"k{i}": i for i in range(9)}, r"and \d+ more"),
    ],
    ids=["setting", "missing", "many"],
)
def test_the_file_of_another_run_is_refused_with_what_differs(other, told, tmp_path):
    Checkpoint(tmp_path / "run.pt", OWNER).write({"step": 1})
    with pytest.raises(ValueError, match=f"run.pt belongs to another run: .*{told}"):
        Checkpoint(tmp_path / "run.pt", other).read()


def test_another_format_is_refused(tmp_path):
    torch.save({"format": 99, "belongs_to": OWNER, "state": {}}, tmp_path / "run.pt")
    with pytest.raises(ValueError, match="has checkpoint format 99"):
        Checkpoint(tmp_path / "run.pt", OWNER).read()


def test_a_file_with_code_in_it_is_not_run(tmp_path):
    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"format": 1, "belongs_to": OWNER, "state": Payload()}, tmp_path / "run.pt")
    with pytest.raises(ValueError, match="is not a checkpoint"):
        Checkpoint(tmp_path / "run.pt", OWNER).read()
    assert not (tmp_path / "ran").exists()


def test_permissions_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        Checkpoint(tmp_path / "run.pt", OWNER).write({"step": 1})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run.pt").stat().st_mode) == 0o640


def test_a_missing_folder_and_a_folder_in_its_place_are_noticed_at_once(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist: create it first"):
        Checkpoint(tmp_path / "nowhere" / "run.pt", OWNER)
    with pytest.raises(IsADirectoryError, match="expected the path of a file"):
        Checkpoint(tmp_path, OWNER)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to read-only folders")
def test_a_read_only_folder_is_noticed_at_once(tmp_path):
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(PermissionError, match="is read-only"):
            Checkpoint(tmp_path / "run.pt", OWNER)
    finally:
        tmp_path.chmod(0o755)


@needs_limits
def test_a_full_disk_is_one_clear_error_and_the_previous_state_still_loads(tmp_path):
    checkpoint = Checkpoint(tmp_path / "run.pt", OWNER)
    checkpoint.write({"step": 1, "weights": torch.ones(10)})
    with full_disk(room=1 << 16), pytest.raises(OSError, match=r"could not be written .* checkpoint is intact"):
        checkpoint.write({"step": 2, "weights": torch.ones(1 << 20)})
    state = checkpoint.read()
    assert state is not None
    assert state["step"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


def write_and_read(path: Path, number: int) -> None:
    checkpoint = Checkpoint(path, OWNER)
    for _ in range(30):
        checkpoint.write({"weights": torch.full((1 << 14,), float(number))})
        state = checkpoint.read()
        assert state is not None
        assert (state["weights"] == state["weights"][0]).all()


def test_two_processes_do_not_collide(tmp_path):
    processes = [forked.start(write_and_read, tmp_path / "run.pt", number) for number in range(2)]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


def write_for_ever(path: Path) -> None:
    checkpoint = Checkpoint(path, OWNER)
    while True:
        checkpoint.write({"weights": torch.ones(1 << 20)})


def test_kill_9_while_writing_leaves_a_whole_file(tmp_path):
    checkpoint = Checkpoint(tmp_path / "run.pt", OWNER)
    checkpoint.write({"weights": torch.zeros(1)})
    before = checkpoint.path.stat().st_ino
    process = forked.start(write_for_ever, tmp_path / "run.pt")
    while checkpoint.path.stat().st_ino == before:  # it has begun to write
        time.sleep(0.01)
    time.sleep(0.1)
    process.kill()
    process.join()
    state = checkpoint.read()
    assert state is not None
    assert (state["weights"] == 1).all()


def test_what_a_killed_writer_left_is_removed_once_it_is_old(tmp_path):
    old, young = (tmp_path / f"run.pt.{name}.partial" for name in ("old", "young"))
    old.touch()
    young.touch()
    os.utime(old, (0, 0))
    Checkpoint(tmp_path / "run.pt", OWNER)
    assert not old.exists()
    assert young.exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(ToyTask(ToySettings(steps=4, ema=0.9, evaluate_every=2)), folder)
    return folder


def same(a, b) -> bool:
    """Equal to the bit, in type too."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        raw = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and a.requires_grad == b.requires_grad and torch.equal(*raw)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


@pytest.mark.parametrize("name", [LAST, BEST])
def test_a_flipped_bit_is_refused_or_changes_nothing(name, trained, tmp_path):
    whole, intact = (trained / name).read_bytes(), checkpoints.read(trained / name)
    generator, told = random.Random(0), []
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
        (tmp_path / name).write_bytes(damaged)
        try:
            content = checkpoints.read(tmp_path / name)
        except ValueError as error:
            told.append(str(error))
        else:
            assert same(content, intact)
    assert all(str(tmp_path / name) in text for text in told)
    assert len(told) > 50
    assert sum("is damaged: state." in text for text in told) > 20  # tensors, by their names


def test_the_tensor_that_is_not_what_was_written_is_named_and_nothing_is_loaded(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    path = tmp_path / "run" / LAST
    weight = checkpoints.read(path)["state"]["updates"]["weights"]["head.weight"]
    raw = weight.contiguous().numpy().tobytes()
    content = bytearray(path.read_bytes())
    assert content.count(raw) == 1
    content[content.index(raw) + 40] ^= 0x40
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"last\.pt is damaged: state\.updates\.weights\.head\.weight is not what was"):
        train(ToyTask(ToySettings(steps=4, ema=0.9, evaluate_every=2)), tmp_path / "run", resume=True)
    assert path.read_bytes() == bytes(content)


def test_weights_of_the_format_before_are_read_but_no_run_is_resumed_from_it(tmp_path):
    torch.save({"format": 1, "belongs_to": OWNER, "state": {"weights": torch.ones(1)}}, tmp_path / "run.pt")
    assert torch.equal(checkpoints.read(tmp_path / "run.pt")["state"]["weights"], torch.ones(1))
    with pytest.raises(ValueError, match="finish it with the version that began it"):
        Checkpoint(tmp_path / "run.pt", OWNER).read()
