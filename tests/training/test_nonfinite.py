"""A loss or gradient that is not finite is never applied, never saved and never best."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lotformer.training import checkpoints
from lotformer.training.checkpoints import Checkpoint
from lotformer.training.finite import NonFiniteError, better
from lotformer.training.loop import Loop, LoopSettings
from lotformer.training.run import BEST, LAST, LOG, train
from lotformer.training.stream import Shuffled
from lotformer.training.updates import LocalUpdates
from support.torture import ToySettings, ToyTask
from support.training_run import count_skipped, side_by_side

SHORT = ToySettings(steps=12, save_every=2, log_every=1, evaluate_every=4)
NAN = float("nan")

SPOILERS = {
    "NaN loss": lambda loss, weight: loss * NAN,
    "infinite loss": lambda loss, weight: loss + float("inf"),
    "NaN gradient of a finite loss": lambda loss, weight: loss + (0 * weight).sqrt().sum(),
    "gradient too large for its norm": lambda loss, weight: loss + 1e30 * weight.sum() - 1e30 * weight.sum().detach(),
}


class Spoiled:
    """A normalised layer whose loss is spoiled at some draws of a batch; the first of them is 1."""

    def __init__(self, spoiler: str, at: set[int], dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)).to(dtype)
        self.spoil, self.at, self.dtype, self.draws = SPOILERS[spoiler], at, dtype, 0
        self.data = [torch.randn(8, 4) for _ in range(5)]
        self.states: dict[int, dict[str, Tensor]] = {}

    def loop(self, path: Path, skip: int, accumulate: int = 1) -> Loop:
        model = self.model
        groups = [{"params": list(model.parameters()), "lr": 0.05}]
        updates = LocalUpdates(model.state_dict(), groups, torch.optim.AdamW, buffers=model.buffers())
        settings = LoopSettings(steps=8, accumulate=accumulate, save_every=1)
        return Loop(settings, self, Shuffled(self.data, 1), updates, Checkpoint(path, {}), skip_nonfinite=skip)

    def begin(self) -> None:
        pass

    def losses(self, batch: Tensor, step: int):
        self.draws += 1
        batch = batch.to(self.dtype)
        loss = self.model(batch * NAN if self.draws in self.at and self.spoil is SPOILERS["NaN loss"] else batch)
        loss = loss.float().square().mean()
        yield self.spoil(loss, self.model[1].weight) if self.draws in self.at else loss

    def after(self, step: int) -> bool:
        self.states[step] = {name: x.clone() for name, x in self.model.state_dict().items()}
        return False

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("spoiler", SPOILERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "masters"])
@pytest.mark.parametrize("accumulate", [1, 3])
class TestLoop:
    def test_the_run_stops_as_it_was_before_the_step(self, spoiler, dtype, accumulate, tmp_path):
        work = Spoiled(spoiler, {4 * accumulate + 1}, dtype)
        run = work.loop(tmp_path / "run.pt", 0, accumulate)
        with pytest.raises(
            NonFiniteError, match=r"step 5: the .* is (nan|inf)\. Nothing .*rate.*clip.*batch.*skip_non"
        ):
            run.run()
        assert run.step == 4
        assert equal(work.model.state_dict(), work.states[4])
        saved = checkpoints.read(tmp_path / "run.pt")["state"]
        assert saved["step"] == 4
        assert equal(saved["updates"]["weights"], work.states[4])

    def test_or_takes_the_step_with_the_next_batch_and_counts(self, spoiler, dtype, accumulate, tmp_path):
        work = Spoiled(spoiler, {4 * accumulate + 1, 5 * accumulate + 1}, dtype)
        run = work.loop(tmp_path / "run.pt", 2, accumulate)
        run.run()
        assert (run.step, run.skipped, work.draws) == (8, 2, 10 * accumulate)
        assert len(run.losses) == 8
        assert all(map(math.isfinite, run.losses))
        assert all(x.isfinite().all() for x in work.model.state_dict().values())
        assert checkpoints.read(tmp_path / "run.pt")["state"]["skipped"] == 2


def test_one_more_in_a_row_than_is_tolerated_stops_the_run(tmp_path):
    run = Spoiled("NaN loss", {5, 7, 8, 9}).loop(tmp_path / "run.pt", 2)
    with pytest.raises(NonFiniteError, match=r"step 6: the loss is nan, as in 2 tries before it.*skip_nonfinite=3"):
        run.run()
    assert (run.step, run.skipped) == (5, 3)


def test_weights_that_overflow_are_blamed_and_not_saved(tmp_path):
    """The gradient is finite, the rate is not of this world; half precision ends at 65,504."""
    work = Spoiled("NaN loss", set(), torch.float16)
    run = work.loop(tmp_path / "run.pt", 0)
    run.updates.peaks = [1e6]
    with pytest.raises(NonFiniteError, match=r"after step 1 the weight 0\.weight is not finite: the learning rate"):
        run.run()
    assert checkpoints.read(tmp_path / "run.pt")["state"]["step"] == 0


@pytest.mark.parametrize("higher", [True, False])
def test_what_is_not_finite_never_wins(higher):
    for value in (NAN, math.inf, -math.inf):
        assert not better(value, None, higher=higher)
        assert not better(value, 1.0, higher=higher)
        assert better(1.0, value, higher=higher)
    assert better(2.0, 1.0, higher=higher) == higher


class Fails(ToyTask):
    """Its loss is NaN at one draw of a batch, its accuracy in one evaluation."""

    def __init__(self, settings: ToySettings, loss_at: int = 0, evaluation_at: int = 0) -> None:
        super().__init__(settings)
        self.loss_at, self.evaluation_at, self.drawn, self.evaluations = loss_at, evaluation_at, 0, 0

    def loss(self, model, batch):
        self.drawn += 1
        return super().loss(model, batch) * (NAN if self.drawn == self.loss_at else 1)

    def evaluate(self, model, process):
        self.evaluations += 1
        return {"accuracy": (NAN, 1.0)} if self.evaluations == self.evaluation_at else super().evaluate(model, process)


class TestTrain:
    def test_the_checkpoint_stays_good_and_the_run_goes_on_from_it(self, tmp_path):
        with pytest.raises(NonFiniteError, match=r"step 8: the loss is nan.*skip_nonfinite=1"):
            train(Fails(SHORT, loss_at=8), tmp_path)
        saved = checkpoints.read(tmp_path / LAST)["state"]
        assert saved["step"] == 6
        assert all(x.isfinite().all() for x in saved["updates"]["weights"].values())
        report = train(Fails(dataclasses.replace(SHORT, skip_nonfinite=1), loss_at=2), tmp_path, resume=True)
        assert (report.steps, report.skipped) == (12, 1)
        assert all(map(math.isfinite, report.losses))
        lines = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
        assert [line["skipped"] for line in lines if "loss" in line] == [0] * 7 + [1] * 5

    def test_an_evaluation_that_is_not_a_number_is_never_the_best(self, tmp_path):
        report = train(Fails(SHORT, evaluation_at=1), tmp_path)
        assert report.best is not None
        assert math.isfinite(report.best)
        assert report.best_step in (8, 12)
        assert checkpoints.read(tmp_path / BEST)["state"]["step"] == report.best_step


SEVERAL = {"steps": 10, "batch_size": 12, "save_every": 1, "lr": 1e-2, "dropout": 0.1, "spoiled": 0.25}


@pytest.mark.parametrize("change", [{}, {"sharded": True}, {"accumulate": 2, "ema": 0.9}], ids=["", "sharded", "parts"])
class TestSeveralProcesses:
    """The losses of each are NaN at other steps."""

    def test_all_skip_the_same_steps(self, change, tmp_path):
        side_by_side(2, count_skipped, tmp_path, {**SEVERAL, **change, "skip_nonfinite": 50})
        told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
        assert told[0] == told[1]
        assert told[0]["skipped"] > 0
        state = checkpoints.read(tmp_path / LAST)["state"]
        assert (state["step"], state["skipped"]) == (10, told[0]["skipped"])
        assert all(x.isfinite().all() for x in state["updates"]["weights"].values())

    def test_all_stop_at_the_same_step(self, change, tmp_path):
        side_by_side(2, count_skipped, tmp_path, {**SEVERAL, **change})
        told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
        assert told[0] == told[1]
        assert "the loss is nan on process" in told[0]["error"]
        state = checkpoints.read(tmp_path / LAST)["state"]
        assert f"step {state['step'] + 1}:" in told[0]["error"]
        assert all(x.isfinite().all() for x in state["updates"]["weights"].values())
