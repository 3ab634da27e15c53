"""The loop: accumulation, clipping, random numbers, interrupts and resuming, on a model of a few weights."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lotformer.training import random_state
from lotformer.training.checkpoints import Checkpoint
from lotformer.training.interrupts import Interrupts
from lotformer.training.loop import Loop, LoopSettings
from lotformer.training.stream import Shuffled
from lotformer.training.updates import LocalUpdates


class Regression:
    """A layer with dropout and noise from all global generators: nothing repeats unless they are restored."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 1))
        self.data = [torch.randn(8, 4) for _ in range(5)]
        self.calls: list[str] = []

    def begin(self) -> None:
        self.calls.append("begin")

    def losses(self, batch: Tensor, step: int) -> Iterator[Tensor]:
        noise = random.random() + np.random.random()  # noqa: NPY002  the generator under test
        yield (self.model(batch) - noise).square().mean()
        yield 1e-2 * sum((p.square().sum() for p in self.model.parameters()), torch.zeros(()))

    def after(self, step: int) -> bool:
        return False

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        self.calls.append("resume")


def loop(work: Regression, checkpoint: Checkpoint | None = None, on_step=None, clip=None, **settings) -> Loop:
    updates = LocalUpdates(
        work.model.state_dict(), [{"params": list(work.model.parameters()), "lr": 0.05}], torch.optim.AdamW, clip
    )
    chosen = LoopSettings(**{"steps": 12, "warmup": 3, "save_every": 4, **settings})
    return Loop(chosen, work, Shuffled(work.data, 1), updates, checkpoint, on_step)


def weights(work: Regression) -> Tensor:
    return torch.cat([x.reshape(-1).double() for x in work.model.state_dict().values()])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("schedule", ["cosine", "one-cycle", "inverse-sqrt"])
def test_interrupted_after_every_step_a_run_ends_as_if_it_had_not_been(schedule, number, tmp_path):
    whole = Regression()
    straight = loop(whole, schedule=schedule, accumulate=2)
    straight.run()

    def on_step(*_: object) -> None:
        signal.raise_signal(number)

    checkpoint = Checkpoint(tmp_path / "run.pt", {})
    for step in range(1, 13):
        parts = Regression()
        run = loop(parts, checkpoint, on_step, schedule=schedule, accumulate=2)
        with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit):
            run.run()
        assert run.step == step
        assert parts.calls == ["begin" if step == 1 else "resume"]
    assert torch.equal(weights(parts), weights(whole))
    assert run.losses == straight.losses


def test_an_error_in_the_middle_of_a_step_costs_the_steps_since_the_last_checkpoint_only(tmp_path):
    whole, parts = Regression(), Regression()
    loop(whole).run()

    def on_step(now: int, *_: object) -> None:
        if now == 7:
            raise RuntimeError("power cut")

    checkpoint = Checkpoint(tmp_path / "run.pt", {})
    with pytest.raises(RuntimeError, match="power cut"):
        loop(parts, checkpoint, on_step).run()
    again = Regression()
    taken: list[int] = []
    loop(again, checkpoint, lambda now, *_: taken.append(now)).run()
    assert taken == list(range(5, 13))
    assert torch.equal(weights(again), weights(whole))


def test_the_second_signal_acts_at_once():
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert interrupts.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_handlers_are_as_before_afterwards():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    loop(Regression()).run()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_run_depends_on_its_seed_alone_and_leaves_the_callers_generators_alone():
    ends = []
    for outside in (1, 2):
        work = Regression()
        random_state.seed_everything(outside)
        loop(work, seed=5).run()
        drawn = torch.rand(1).item(), random.random(), np.random.random()  # noqa: NPY002
        random_state.seed_everything(outside)
        assert drawn == (torch.rand(1).item(), random.random(), np.random.random())  # noqa: NPY002
        ends.append(weights(work))
    assert torch.equal(*ends)


class Plain(Regression):
    """Without noise: a step is a function of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 1))

    def losses(self, batch: Tensor, step: int) -> Iterator[Tensor]:
        yield self.model(batch).square().mean()


def test_accumulated_batches_make_the_step_of_one_large_batch():
    small, large = Plain(), Plain()
    large.data = [torch.cat(small.data)]
    runs = [loop(small, steps=4, accumulate=5), loop(large, steps=4)]
    for run in runs:
        run.run()
    assert torch.allclose(weights(small), weights(large), rtol=1e-5)
    assert runs[0].losses == pytest.approx(runs[1].losses, rel=1e-5)


def test_clipping_bounds_the_gradient():
    work = Plain()
    seen: list[float] = []
    run = loop(work, clip=1e-3, steps=3)
    run.updates.optimizer.register_step_pre_hook(
        lambda optimizer, *_: seen.append(torch.cat([p.grad.reshape(-1) for p in work.model.parameters()]).norm())
    )
    run.run()
    assert len(seen) == 3
    assert all(norm <= 1e-3 * 1.01 for norm in seen)


def test_every_epoch_visits_everything_once_in_an_order_of_its_own():
    stream = Shuffled(range(20), seed=0)
    epochs = [[stream.next() for _ in range(20)] for _ in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    resumed = Shuffled(range(20), seed=0)
    resumed.load_state_dict({"drawn": 33})
    assert [resumed.next() for _ in range(7)] == epochs[1][13:]
