"""Several processes train as one would with the same global batch; one that dies ends the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from lotformer.training.run import LAST
from support.training_run import together, under_torchrun

SETTINGS = {"steps": 8, "batch_size": 12, "dropout": 0.0, "lr": 1e-2, "evaluate_every": 4, "save_every": 3}
SETTINGS |= {"adam_eps": 1e-4}  # Adam blows up gradients that are zero but for rounding, as those of the keys' bias


def state(out: Path) -> dict[str, Any]:
    return torch.load(out / LAST, weights_only=True)["state"]


def kill(rank: int, step: int) -> dict[str, str]:
    """The environment in which a process kills itself during a step."""
    return {"KILL_RANK": str(rank), "KILL_AT": str(step)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("alone")
    together(1, out, SETTINGS)
    return state(out)


@pytest.mark.parametrize(
    ("processes", "settings"),
    [(2, {}), (4, {}), (2, {"sharded": True}), (2, {"accumulate": 2}), (3, {"workers": 1, "ema": 0.9})],
    ids=["2", "4", "2-sharded", "2-accumulate", "3-workers"],
)
def test_the_loss_curve_is_that_of_one_process(processes, settings, alone, tmp_path):
    together(processes, tmp_path, {**SETTINGS, **settings})
    ended = state(tmp_path)
    assert len(ended["processes"]) == processes
    assert ended["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    for name, weight in alone["updates"]["weights"].items():
        torch.testing.assert_close(ended["updates"]["weights"][name], weight, rtol=1e-4, atol=1e-5)
    if "ema" not in settings:  # an average is what is evaluated then
        assert ended["work"]["metrics"] == alone["work"]["metrics"]


def test_another_number_of_processes_goes_on_with_the_same_data(alone, tmp_path):
    with pytest.raises(Exception, match=r"SIGKILL|peer"):
        together(2, tmp_path, SETTINGS, kill(rank=1, step=5))
    together(1, tmp_path, SETTINGS)
    assert state(tmp_path)["losses"] == pytest.approx(alone["losses"], rel=1e-5)


@pytest.mark.parametrize(("processes", "settings"), [(4, {}), (2, {"sharded": True})], ids=["4", "2-sharded"])
def test_several_processes_resume_bit_for_bit(processes, settings, tmp_path):
    settings = {**SETTINGS, **settings, "dropout": 0.1}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    together(processes, whole, settings)
    with pytest.raises(Exception, match=r"SIGKILL|peer"):
        together(processes, parts, settings, kill(rank=1, step=5))
    assert state(parts)["step"] == 3
    together(processes, parts, settings)
    ended = [state(folder) for folder in (parts, whole)]
    assert ended[0]["losses"] == ended[1]["losses"]
    for name, weight in ended[0]["updates"]["weights"].items():
        assert torch.equal(weight, ended[1]["updates"]["weights"][name]), name


def test_a_process_that_dies_ends_the_run_with_its_name(tmp_path):
    with pytest.raises(ChildFailedError) as caught:
        under_torchrun(2, tmp_path, SETTINGS, kill(rank=1, step=5))
    told = str(caught.value)
    assert "rank      : 1" in told
    assert "SIGKILL" in told
    assert len(state(tmp_path)["processes"]) == 2
    assert state(tmp_path)["step"] == 3
