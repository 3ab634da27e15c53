"""Training runs in processes of their own, by themselves or under torchrun's agent.

They are forked from a server that has everything imported and has never run a thread: OpenMP's pool does not survive a
fork, so a child of the tests' own process could wait forever. KILL_RANK and KILL_AT in the environment kill one process
of a toy run during a step.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lotformer.training.run import train
from support import torture
from support.torture import ToySettings, ToyTask

IMPORTED = [*torture.IMPORTED, "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"]
IMPORTED += ["lotformer_paper.experiments.longrange.task"]


class Mortal(ToyTask):
    """Dies during a step if the environment says so."""

    steps = 0

    def loss(self, model, batch):
        self.steps += 1
        if os.environ.get("KILL_RANK") == os.environ.get("RANK") and self.steps == int(os.environ.get("KILL_AT", "-1")):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


def run(out: Path, settings: dict[str, Any]) -> None:
    train(Mortal(ToySettings(**settings)), out, resume=True)


def count_skipped(out: Path, settings: dict[str, Any]) -> None:
    """The toy run; what every process thinks of how it ended is in `out/RANK.json`."""
    from lotformer.training.finite import NonFiniteError

    try:
        report = train(ToyTask(ToySettings(**settings)), out)
        told = {"skipped": report.skipped, "losses": report.losses}
    except NonFiniteError as error:
        told = {"error": str(error).split(" (data at ")[0]}
    (out / f"{os.environ['RANK']}.json").write_text(json.dumps(told))


def learn_longrange(sets: Path, out: Path, settings: dict[str, Any]) -> None:
    """A run on a prepared set of the Long Range Arena; its losses are in `out/losses.json`."""
    from lotformer_paper.data.longrange.store import open_set
    from lotformer_paper.experiments.longrange.settings import settings_for
    from lotformer_paper.experiments.longrange.task import LongRange

    report = train(LongRange(settings_for(**settings), open_set(sets)), out)
    if os.environ.get("RANK", "0") == "0":
        (out / "losses.json").write_text(json.dumps(report.losses))


def together(processes: int, out: Path, settings: dict[str, Any], environment: Mapping[str, str] | None = None) -> None:
    """The toy run on several processes that know of each other, as torchrun would start them."""
    side_by_side(processes, run, out, settings, environment=environment)


def side_by_side(
    processes: int, function: Callable[..., None], *arguments: Any, environment: Mapping[str, str] | None = None
) -> None:
    """A function of this module on several such processes. Raises if one of them does not end well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTED)
    everything = (processes, port, dict(environment or {}), function, arguments)
    multiprocessing.start_processes(_join, everything, processes, start_method="forkserver")


def under_torchrun(processes: int, out: Path, settings: dict[str, Any], environment: Mapping[str, str]) -> None:
    """The toy run under torchrun's own agent, which watches the processes and tells how they end."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTED)
    one_node = LaunchConfig(
        1,
        1,
        processes,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        start_method="forkserver",
        monitor_interval=0.02,
        max_restarts=0,
    )
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        elastic_launch(one_node, _launched)(out, settings, dict(environment))
    finally:
        for number, handler in handlers.items():  # the agent's stay otherwise
            if signal.getsignal(number) != handler:
                signal.signal(number, handler)


def _join(
    rank: int,
    processes: int,
    port: int,
    environment: dict[str, str],
    function: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    _alone(environment)
    function(*arguments)
    torch.distributed.destroy_process_group()


def _launched(out: Path, settings: dict[str, Any], environment: dict[str, str]) -> None:
    _alone(environment)
    run(out, settings)


def _alone(environment: dict[str, str]) -> None:
    os.environ |= environment | {"OMP_NUM_THREADS": "1"}  # Accelerate would set as many threads as there are cores
    torture.prepare_process()
