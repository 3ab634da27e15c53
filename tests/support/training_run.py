"""Training runs of the toy task in processes of their own.

`together` forks them from a server that has everything imported and has never run a thread: OpenMP's pool does not
survive a fork, so a child of the tests' own process might wait forever. As a script, for torchrun:

    torchrun --nproc-per-node=2 training_run.py OUT SETTINGS-AS-JSON

where the environment variables KILL_RANK and KILL_AT kill one process during a step.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing

from lotformer.training.run import train
from lotformer.training.torture import IMPORTED, ToySettings, ToyTask

SHARDING = ("torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict")


class Mortal(ToyTask):
    """Dies during a step if the environment says so."""

    steps = 0

    def loss(self, model, batch):
        self.steps += 1
        if os.environ.get("KILL_RANK") == os.environ.get("RANK") and self.steps == int(os.environ.get("KILL_AT", "-1")):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


def run(out: Path, settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    train(Mortal(ToySettings(**settings)), out, resume=True)


def together(processes: int, out: Path, settings: dict[str, Any], environment: dict[str, str] | None = None) -> None:
    """The run on several processes that know of each other, as torchrun would start them."""
    side_by_side(processes, run, out, settings, environment=environment)


def side_by_side(
    processes: int, function: Callable[..., None], *arguments: Any, environment: dict[str, str] | None = None
) -> None:
    """Any function on several such processes. Raises if one of them does not end well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.get_context("forkserver").set_forkserver_preload([*IMPORTED, *SHARDING])
    given = (processes, port, environment or {}, function, arguments)
    multiprocessing.start_processes(_join, given, processes, start_method="forkserver")


def _join(
    rank: int,
    processes: int,
    port: int,
    environment: dict[str, str],
    function: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    os.environ |= environment | {"OMP_NUM_THREADS": "1"}  # Accelerate would set as many threads as there are cores
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    function(*arguments)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run(Path(sys.argv[1]), json.loads(sys.argv[2]))
