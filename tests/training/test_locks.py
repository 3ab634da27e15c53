"""A folder belongs to one run at a time, by a lock that its process names itself in, and keeps what a run has left."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from pathlib import Path

import pytest

from lotformer.training.locks import LOCK, holding
from lotformer.training.run import BEST, LAST, LOG, train
from support import forked
from support.torture import ToySettings, ToyTask
from support.training_run import together

ENDLESS = ToySettings(steps=10**6, save_every=1, evaluate_every=5, workers=1)
SHORT = ToySettings(steps=6, save_every=2, log_every=1, evaluate_every=3)


def endless(out: Path) -> None:
    train(ToyTask(ENDLESS), out, resume=True)


def begin_together(out: Path, result: Path, start: float) -> None:
    """Wait for the moment, then train; how that ended is in `result`."""
    time.sleep(max(0, start - time.time()))
    try:
        train(ToyTask(SHORT), out)
        result.write_text("trained")
    except (OSError, ValueError) as error:
        result.write_text(f"{type(error).__name__}: {error}")


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


@pytest.fixture
def running(tmp_path):
    process = forked.start(endless, tmp_path / "run")
    wait_for(tmp_path / "run" / LOG)
    yield process
    process.kill()
    process.join()


class TestHeld:
    @pytest.mark.parametrize("resume", [False, True])
    def test_the_folder_of_a_run_that_goes_on_is_refused_with_the_name_of_its_process(self, resume, running, tmp_path):
        with pytest.raises(BlockingIOError, match=rf"run is in use by process {running.pid} on .*, since \d{{4}}-"):
            train(ToyTask(ENDLESS), tmp_path / "run", resume=resume)
        assert running.is_alive()

    def test_a_run_that_was_killed_is_taken_over_at_once(self, running, tmp_path):
        """Though its workers, forked from it, may live a little longer, and its name is still in the file."""
        assert str(running.pid) in (tmp_path / "run" / LOCK).read_text()
        running.kill()
        running.join()
        again = forked.start(endless, tmp_path / "run")
        owner = tmp_path / "run" / LOCK
        while not owner.read_text() or json.loads(owner.read_text())["pid"] != again.pid:
            assert again.is_alive()
            time.sleep(0.01)
        again.kill()
        again.join()

    def test_of_many_that_begin_at_once_one_wins(self, tmp_path):
        start = time.time() + 1
        results = [tmp_path / f"{index}.txt" for index in range(6)]
        processes = [forked.start(begin_together, tmp_path / "run", result, start) for result in results]
        for process in processes:
            process.join()
        told = [result.read_text() for result in results]
        assert told.count("trained") == 1, told
        assert all(re.match("trained|BlockingIOError|ValueError: .* holds a run already", text) for text in told), told
        lines = [json.loads(line) for line in (tmp_path / "run" / LOG).read_text().splitlines()]
        assert [line["step"] for line in lines if "loss" in line] == list(range(1, 7))

    def test_the_processes_of_a_run_share_it(self, tmp_path):
        together(2, tmp_path / "run", {"steps": 2, "batch_size": 12})
        assert (tmp_path / "run" / LAST).exists()
        assert (tmp_path / "run" / LOCK).read_text() == ""

    def test_threads_keep_each_other_out_and_do_not_end_the_lock(self, tmp_path):
        refused: list[OSError] = []

        def other() -> None:
            try:
                with holding(tmp_path):
                    pass
            except OSError as error:
                refused.append(error)

        with holding(tmp_path):
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            assert re.search(rf"another run of this process \({os.getpid()}\)", str(refused))
            assert forked.run(hold, tmp_path) == 1
        assert forked.run(hold, tmp_path) == 0


def hold(folder: Path) -> None:
    try:
        with holding(folder):
            pass
    except OSError:
        os._exit(1)


class TestKept:
    @pytest.mark.parametrize("resume", [False, True])
    @pytest.mark.parametrize("left", [(BEST,), (LOG,), (BEST, LOG)], ids=" and ".join)
    def test_what_a_finished_run_left_is_not_overwritten_where_its_checkpoint_is_missing(self, left, resume, tmp_path):
        train(ToyTask(SHORT), tmp_path / "whole")
        out = tmp_path / "run"
        out.mkdir()
        for name in left:
            shutil.copy(tmp_path / "whole" / name, out)
        told = "not its last.pt, from which it could be resumed" if resume else "holds a run already"
        with pytest.raises(ValueError, match=told) as caught:
            train(ToyTask(SHORT), out, resume=resume)
        assert all(name in str(caught.value) for name in left)
        for name in left:
            assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()

    def test_a_run_that_was_killed_in_its_first_step_begins_again(self, tmp_path):
        """There is a checkpoint before there is anything else."""
        with pytest.raises(ZeroDivisionError):
            train(Fails(SHORT), tmp_path)
        assert (tmp_path / LAST).exists()
        assert not (tmp_path / LOG).exists()
        assert train(ToyTask(SHORT), tmp_path, resume=True).steps == 6


class Fails(ToyTask):
    def loss(self, model, batch):
        raise ZeroDivisionError
