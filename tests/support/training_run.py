"""Training runs of the toy task in processes of their own, forked: they have everything imported.

The environment variables KILL_RANK and KILL_AT kill one process during a step.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from torch import multiprocessing
from torch.distributed import fsdp  # noqa: F401  imported once, before processes are forked
from torch.distributed.checkpoint import state_dict  # noqa: F401  the same
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lotformer.training.run import train
from lotformer.training.torture import ToySettings, ToyTask


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


def together(processes: int, out: Path, settings: dict[str, Any]) -> None:
    """The run on several processes that know of each other, as torchrun would start them."""
    side_by_side(processes, run, out, settings)


def under_torchrun(processes: int, out: Path, settings: dict[str, Any]) -> None:
    """The same under torchrun's own agent, which watches the processes and tells how they end."""
    one_node = LaunchConfig(
        1,
        1,
        processes,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        start_method="fork",
        monitor_interval=0.02,
        max_restarts=0,
    )
    elastic_launch(one_node, _launched)(out, settings)


def _launched(out: Path, settings: dict[str, Any]) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    run(out, settings)


def side_by_side(processes: int, function: Callable[..., None], *arguments: Any) -> None:
    """Any function on several such processes. Raises if one of them does not end well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.start_processes(_fork, (processes, port, function, arguments), processes, start_method="fork")


def _fork(rank: int, processes: int, port: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    AcceleratorState._reset_state(reset_partial_state=True)  # what earlier tests of the parent have left
    PartialState._reset_state()
    function(*arguments)
    torch.distributed.destroy_process_group()
