"""Functions in processes of their own, forked from a server that has all imported and never ran a thread."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from support.torture import IMPORTED, prepare_process


def start(function: Callable[..., Any], *arguments: Any, output: Path | None = None) -> BaseProcess:
    """Call the function in a new process; what it prints goes to `output`, where one is given."""
    context = get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    process = context.Process(target=_call, args=(function, arguments, output))
    process.start()
    return process


def run(function: Callable[..., Any], *arguments: Any, output: Path | None = None) -> int:
    """The same, and wait. Returns the exit code: 0, or minus the number of the signal that ended it."""
    process = start(function, *arguments, output=output)
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _call(function: Callable[..., Any], arguments: tuple[Any, ...], output: Path | None) -> None:
    if output is not None:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        sys.stdout = os.fdopen(1, "w", closefd=False)
    prepare_process()
    function(*arguments)
    sys.stdout.flush()
