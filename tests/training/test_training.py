"""Training from scratch: it learns, logs, keeps the best weights, and resumes as if nothing had happened."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from lotformer.layers import LOTAttention
from lotformer.training.checkpoints import Checkpoint
from lotformer.training.decay import parameter_groups
from lotformer.training.run import BEST, LAST, LOG, TrainingReport, train
from lotformer.training.settings import TrainSettings
from lotformer.training.teams import Process
from lotformer.training.timing import AttentionClock
from support import forked
from support.torture import ToySettings, ToyTask

SHORT = ToySettings(steps=12, save_every=5, log_every=2, evaluate_every=4, warmup_steps=2)


def run(out: Path, settings: ToySettings = SHORT, resume: bool = False, listeners=()) -> TrainingReport:
    return train(ToyTask(settings), out, resume=resume, listeners=listeners)


def state(folder: Path) -> dict:
    return torch.load(folder / LAST, weights_only=True)["state"]


def equal(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


class Listening:
    """Does something after a step; notes what it heard."""

    def __init__(self, at: int | None = None, act=lambda: None) -> None:
        self.at, self.act, self.steps, self.metrics, self.begun = at, act, [], {}, None

    def started(self, step, steps):
        self.begun = step

    def stepped(self, progress):
        self.steps.append(progress)
        if progress.step == self.at:
            self.act()

    def evaluated(self, step, metrics):
        self.metrics[step] = metrics

    def ended(self):
        pass


def test_a_task_is_learned(tmp_path):
    report = run(tmp_path, ToySettings(steps=150, lr=1e-2, save_every=1000, ema=0.9))
    assert sum(report.losses[-10:]) < 0.5 * sum(report.losses[:10])
    assert report.metrics["accuracy"] >= 0.65
    assert 0 <= report.waiting <= 1
    assert 0 < report.attention < 1


@pytest.mark.parametrize(
    "change",
    [{}, {"ema": 0.9, "accumulate": 2}, {"precision": "bf16"}, {"schedule": "inverse-sqrt", "workers": 1}],
    ids=["plain", "ema-accumulate", "bf16", "workers"],
)
def test_an_interrupted_run_resumes_bit_for_bit(change, tmp_path):
    settings = dataclasses.replace(SHORT, **change)
    run(tmp_path / "whole", settings)
    for step in (3, 7):
        listening = Listening(step, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "parts", settings, resume=True, listeners=[listening])
        assert listening.steps[-1].step == step
    run(tmp_path / "parts", settings, resume=True)
    assert equal(state(tmp_path / "parts"), state(tmp_path / "whole"))
    best = [torch.load(tmp_path / name / BEST, weights_only=True)["state"] for name in ("parts", "whole")]
    assert equal(*best)


@pytest.mark.parametrize(
    ("count", "change"), [(1, {"workers": 2}), (3, {}), (1, {"accumulate": 2})], ids=["workers", "processes", "parts"]
)
def test_samples_and_their_noise_do_not_depend_on_who_loads_them(count, change):
    def samples(settings: ToySettings, count: int) -> torch.Tensor:
        streams = [ToyTask(settings).stream(Process(index, count)) for index in range(count)]
        batches = 8 * settings.accumulate  # of 16 out of 96 samples: more than an epoch
        return torch.cat([stream.next()[0] for _ in range(batches) for stream in streams])

    assert torch.equal(samples(dataclasses.replace(SHORT, **change), count), samples(SHORT, 1))


def test_workers_end_with_the_run(tmp_path):
    others = multiprocessing.active_children()
    run(tmp_path, dataclasses.replace(SHORT, workers=2))
    assert [child for child in multiprocessing.active_children() if child not in others] == []


class Murder(ToyTask):
    """Kills the worker that loads its data."""

    steps = 0

    def loss(self, model, batch):
        self.steps += 1
        if self.steps == 7:
            worker = multiprocessing.active_children()[0].pid
            print(worker, flush=True)
            os.kill(worker, signal.SIGKILL)
        return super().loss(model, batch)


def murder(out: Path) -> None:
    try:
        train(Murder(ToySettings(workers=1, steps=10**6, save_every=5)), out)
    except OSError as error:
        print(error, flush=True)
        os._exit(1)  # torch's handler repeats the error until the process is gone


def test_a_worker_that_dies_ends_the_run_with_its_name(tmp_path):
    assert forked.run(murder, tmp_path / "run", output=tmp_path / "output") == 1
    worker, told = (tmp_path / "output").read_text().splitlines()
    assert told.startswith(f"process 0: DataLoader worker (pid {worker}) is killed by signal: Killed.")
    assert state(tmp_path / "run")["step"] % 5 == 0


def test_a_batch_that_does_not_divide_evenly_counts_by_its_samples():
    streams = [ToyTask(SHORT).stream(Process(index, 3)) for index in range(3)]
    sizes = [len(stream.next()[0]) for stream in streams]
    assert sizes == [5, 5, 6]
    assert [stream.share for stream in streams] == pytest.approx([size * 3 / 16 for size in sizes])


def test_loading_leaves_the_generators_of_the_model_alone():
    stream = ToyTask(SHORT).stream(Process())
    before = torch.get_rng_state()
    stream.next()
    assert torch.equal(torch.get_rng_state(), before)


class TestFiles:
    def test_every_logged_step_is_there_once_however_often_the_run_died(self, tmp_path):
        for step in (3, 9):
            with pytest.raises(RuntimeError):
                run(tmp_path, resume=True, listeners=[Listening(step, self.die)])
        with open(tmp_path / LOG, "a") as log:
            log.write('{"step": 1')  # as a kill in the middle of a line leaves it
        run(tmp_path, resume=True)
        lines = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
        assert [line["step"] for line in lines if "loss" in line] == [2, 4, 6, 8, 10, 12]
        assert [line["step"] for line in lines if "evaluation" in line] == [4, 8, 12]
        assert {"loss", "rate", "samples_per_second", "seconds_left", "waiting", "attention"} <= lines[0].keys()
        assert list((tmp_path / "tensorboard").iterdir())

    @staticmethod
    def die() -> None:
        raise RuntimeError("gone")

    def test_the_best_weights_are_those_of_the_best_evaluation(self, tmp_path):
        listening = Listening()
        report = run(tmp_path, dataclasses.replace(SHORT, lr=0.05, evaluate_every=2), listeners=[listening])
        values = {step: metrics["accuracy"] for step, metrics in listening.metrics.items()}
        assert report.best == max(values.values())
        assert values[report.best_step] == report.best
        best = torch.load(tmp_path / BEST, weights_only=True)["state"]
        assert (best["step"], best["metrics"]) == (report.best_step, {"accuracy": report.best})
        model = ToyTask(SHORT).build_model()
        model.load_state_dict(best["weights"])
        with torch.no_grad():
            right, seen = ToyTask(SHORT).evaluate(model.eval(), Process())["accuracy"]
        assert right / seen == report.best

    def test_a_folder_with_a_run_is_not_overwritten(self, tmp_path):
        run(tmp_path)
        before = (tmp_path / LAST).read_bytes()
        with pytest.raises(ValueError, match="holds a run already: resume it"):
            run(tmp_path)
        assert (tmp_path / LAST).read_bytes() == before

    @pytest.mark.parametrize(
        ("change", "told"),
        [({"lr": 0.5}, "settings.lr is 0.5 here"), ({"steps": 13}, "settings.steps is 13 here and 12 there")],
    )
    def test_another_run_is_refused_with_what_differs(self, change, told, tmp_path):
        run(tmp_path)
        with pytest.raises(ValueError, match=told):
            run(tmp_path, dataclasses.replace(SHORT, **change), resume=True)

    def test_another_architecture_is_refused(self, tmp_path):
        run(tmp_path)
        task = ToyTask(SHORT)
        task.build_model = lambda: nn.Linear(3, 2)
        with pytest.raises(ValueError, match=r"parameters.weight is float32"):
            train(task, tmp_path, resume=True)

    def test_what_changes_no_result_may_change(self, tmp_path):
        with pytest.raises(RuntimeError):
            run(tmp_path / "parts", listeners=[Listening(7, self.die)])
        run(tmp_path / "parts", dataclasses.replace(SHORT, workers=1, log_every=3, save_every=4), resume=True)
        run(tmp_path / "whole")
        assert equal(state(tmp_path / "parts"), state(tmp_path / "whole"))

    def test_a_failed_write_ends_the_run_with_one_clear_error(self, tmp_path, monkeypatch):
        def full(self, state):
            raise OSError("no space left")

        monkeypatch.setattr(Checkpoint, "write", full)
        with pytest.raises(OSError, match="no space left"):
            run(tmp_path)


def test_pivots_masses_and_eps_do_not_decay_in_the_built_optimizer():
    from timm.models.vision_transformer import VisionTransformer

    class Layer(LOTAttention):
        def __init__(self, dim, **options):
            super().__init__(dim, rank=4, learn_eps=True, **options)

    model = VisionTransformer(
        img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=3, attn_layer=Layer
    )
    groups = parameter_groups(model, 0.05)
    optimizer = torch.optim.AdamW(groups)
    decay = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    names = {name: decay[parameter] for name, parameter in model.named_parameters()}
    spared = [name for name in names if "mechanism" in name]
    assert any("pivots" in name for name in spared)
    assert any("eps" in name for name in spared)
    assert all(names[name] == 0 for name in spared), names
    assert names["blocks.0.attn.qkv.weight"] == 0.05
    assert names["blocks.0.norm1.weight"] == names["pos_embed"] == 0


class TestAttentionClock:
    @pytest.mark.parametrize("qk_norm", [False, True], ids=["scores from the input", "queries and keys"])
    def test_watching_changes_no_gradient_and_counts_forward_and_backward(self, qk_norm):
        layer, x = (
            LOTAttention(16, num_heads=2, rank=4, qk_norm=qk_norm, norm_layer=nn.LayerNorm),
            torch.randn(2, 30, 16),
        )
        gradients = []
        clock = AttentionClock(layer)
        for watched in (False, True):
            layer.zero_grad()
            if watched:
                with clock.watching():
                    layer(x).square().sum().backward()
            else:
                layer(x).square().sum().backward()
            gradients.append([p.grad.clone() for p in layer.parameters() if p.grad is not None])
        assert equal(*gradients)
        assert clock.take() > 0
        assert clock.take() == 0
        assert not any("forward" in vars(module) for module in layer.modules())

    @pytest.mark.parametrize("qk_norm", [False, True], ids=["scores from the input", "queries and keys"])
    def test_the_backward_is_in_it(self, qk_norm):
        layer, x = (
            LOTAttention(16, num_heads=2, rank=4, qk_norm=qk_norm, norm_layer=nn.LayerNorm),
            torch.randn(2, 400, 16),
        )
        clock = AttentionClock(layer)
        with clock.watching():
            loss = layer(x).square().sum()
            assert len(clock._intervals) == 1
            loss.backward()
            assert len(clock._intervals) == 2


class TestSettings:
    def test_lengths_in_epochs_become_steps(self):
        settings = TrainSettings(epochs=3, warmup_epochs=0.5, batch_size=8, accumulate=2)
        loop = settings.loop(batches_per_epoch=40)
        assert (loop.steps, loop.warmup, loop.accumulate) == (60, 10, 2)

    def test_epochs_need_data_with_an_end(self):
        with pytest.raises(ValueError, match="need data with an end"):
            TrainSettings(epochs=3).loop(None)

    def test_a_batch_must_divide(self):
        with pytest.raises(ValueError, match="multiple of accumulate, got 10 and 3"):
            TrainSettings(batch_size=10, accumulate=3)

    def test_too_few_samples_for_a_batch(self):
        with pytest.raises(ValueError, match="needs 128 samples and the data have 96"):
            ToyTask(ToySettings(batch_size=128)).stream(Process())
