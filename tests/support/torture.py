"""Kill a training run again and again, resume it, and compare it with one that nobody touched.

    make torture                    # 50 kills; then once more with one loss in ten NaN

The run uses everything whose state could be forgotten: dropout, noisy samples loaded by workers, a schedule, an average
of the weights, accumulation; with `--spoiled`, also losses that are NaN at random steps, which it skips. It is killed
with SIGKILL at random moments, many of them while it writes a checkpoint. In the end weights, optimizer, average,
losses, random generators and position in the data must be equal bit for bit.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import get_all_start_methods, get_context, set_start_method
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lotformer.layers import LOTAttention
from lotformer.settings import setting
from lotformer.training.checkpoints import read
from lotformer.training.fingerprints import differences, fingerprint
from lotformer.training.loader import LoaderStream, shuffled
from lotformer.training.logs import Progress
from lotformer.training.run import LAST, train
from lotformer.training.settings import TrainSettings
from lotformer.training.task import Sums
from lotformer.training.teams import Process

_TOKENS, _DIM = 12, 16

IMPORTED = ("support.torture", "lotformer.models", "accelerate", "torch.utils.tensorboard")
"""Modules that a training run imports, preloaded by servers that fork runs."""


@dataclass(frozen=True)
class ToySettings(TrainSettings):
    """A run of seconds."""

    steps: int = setting(200, "Updates in all.", at_least=1)
    batch_size: int = setting(16, "Samples per update, over all processes and accumulated batches.", at_least=1)
    save_every: int = setting(2, "Updates between checkpoints.", at_least=1)
    dropout: float = setting(0.1, "Of the model.", at_least=0, at_most=1)
    noise: float = setting(0.1, "Of the samples, drawn anew whenever one is loaded.", at_least=0)
    spoiled: float = setting(0.0, "Share of the losses that are NaN.", at_least=0, at_most=1)


class _Toys:
    """Random sequences `(N, C)`; the class of one is the half of it that is larger. Every generator adds noise."""

    def __init__(self, count: int, seed: int, noise: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens, self.noise = torch.randn(count, _TOKENS, _DIM, generator=generator), noise
        halves = self.tokens.sum(-1).unflatten(-1, (2, -1)).sum(-1)
        self.labels = halves.argmax(-1)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = self.tokens[index]
        if self.noise:
            drawn = torch.randn(()).item() + random.random() + np.random.random()  # noqa: NPY002  all must be restored
            tokens = tokens + self.noise * drawn * torch.randn_like(tokens)
        return tokens, self.labels[index]


class _Model(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.position = nn.Parameter(0.1 * torch.randn(_TOKENS, _DIM))
        blocks = (LOTAttention(_DIM, num_heads=2, rank=4, proj_drop=dropout) for _ in range(2))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(_TOKENS * _DIM, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.position
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.flatten(1))


class ToyTask:
    """Tell which half of a sequence is larger: a whole task in a few lines, for tests of the loop."""

    name = "toy"
    metric = "accuracy"
    higher_is_better = True

    def __init__(self, settings: ToySettings) -> None:
        self.settings = settings

    def build_model(self) -> nn.Module:
        return _Model(self.settings.dropout)

    def stream(self, process: Process) -> LoaderStream:
        data, s = _Toys(96, 1, self.settings.noise), self.settings
        batches = shuffled(len(data), s.part_size, s.seed)
        described = fingerprint([data.tokens, data.labels])
        return LoaderStream(data, batches, seed=s.seed, process=process, workers=s.workers, described=described)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, labels = batch
        loss = nn.functional.cross_entropy(model(tokens), labels, label_smoothing=self.settings.label_smoothing)
        spoiled = self.settings.spoiled and torch.rand(()) < self.settings.spoiled
        return loss * float("nan") if spoiled else loss

    def evaluate(self, model: nn.Module, process: Process) -> Sums:
        data = _Toys(32, 2, noise=0)
        own = slice(process.index, None, process.count)
        right = model(data.tokens[own]).argmax(-1) == data.labels[own]
        return {"accuracy": (float(right.sum()), float(len(right)))}


class _Steps:
    """Tells of every step, for the process that holds the sword."""

    def __init__(self, told: Connection) -> None:
        self.told = told

    def started(self, step: int, steps: int) -> None:
        pass

    def stepped(self, progress: Progress) -> None:
        self.told.send(progress.step)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def ended(self) -> None:
        pass


def prepare_process() -> None:
    """Make a process that was forked from a server what one that was started by itself is."""
    torch.set_num_threads(1)
    if "fork" in get_all_start_methods():
        set_start_method("fork", force=True)  # for workers that load; they would get a server of their own each


def _run(out: Path, steps: int, workers: int, spoiled: float, told: Connection) -> None:
    prepare_process()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # workers complain when their process dies
    settings = ToySettings(
        steps=steps,
        accumulate=2,
        warmup_steps=5,
        ema=0.9,
        label_smoothing=0.1,
        evaluate_every=7,
        workers=workers,
        spoiled=spoiled,
        skip_nonfinite=100,
    )
    train(ToyTask(settings), out, resume=True, listeners=[_Steps(told)])


def _life(out: Path, steps: int, workers: int, spoiled: float, kill_after: int | None) -> int:
    """Run in a process of its own; kill it some moment after `kill_after` steps of this life. Returns its exit code."""
    context = _context()
    steps_taken, told = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(out, steps, workers, spoiled, told))
    process.start()
    told.close()
    if kill_after is None:
        while _heard(steps_taken):
            pass
    else:
        for _ in range(kill_after):
            _heard(steps_taken)
        time.sleep(random.uniform(0, 0.05))
        process.kill()
    process.join()
    return process.exitcode


def _context() -> Any:
    """Processes forked from one that has everything imported, which is most of a life otherwise, and nothing else.

    The caller itself would not do: pools of threads, which it may have, do not survive a fork.
    """
    if "forkserver" not in get_all_start_methods():
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    return context


def _heard(steps_taken: Connection) -> bool:
    try:
        steps_taken.recv()
    except EOFError:
        return False
    return True


def torture(kills: int, folder: Path, workers: int = 2, spoiled: float = 0.0) -> str:
    """Run twice, once with `kills` kills; returns what differs in the end, in words: nothing if all is well."""
    steps = 4 * (kills + 1)  # few enough steps per life that every kill finds the run alive
    whole, killed = folder / "whole", folder / "killed"
    if code := _life(whole, steps, workers, spoiled, None):
        raise RuntimeError(f"the run that nobody touched ended with exit code {code}.")
    for count in range(kills):
        code = _life(killed, steps, workers, spoiled, random.randint(0, 4))
        if code != -signal.SIGKILL:
            raise RuntimeError(f"kill {count + 1} came too late: the run had ended with exit code {code}.")
        print(f"killed {count + 1} of {kills}", flush=True)
    if code := _life(killed, steps, workers, spoiled, None):
        raise RuntimeError(f"the resumed run ended with exit code {code}.")
    return differences(_digest(killed / LAST), _digest(whole / LAST), most=20)


def _digest(path: Path) -> dict[str, Any]:
    """Fingerprints of everything in a checkpoint."""
    state = read(path)["state"]
    return {
        name: {key: fingerprint(item) for key, item in value.items()} if isinstance(value, dict) else fingerprint(value)
        for name, value in state.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--spoiled", type=float, default=0.0, help="share of the losses that are NaN")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        different = torture(arguments.kills, Path(folder), arguments.workers, arguments.spoiled)
    sys.exit(f"not equal after {arguments.kills} kills: {different}" if different else None)


if __name__ == "__main__":
    main()
