"""Memory of workloads, measured inside a process of its own: `python -m lotformer_paper.bench.peak < workloads.json`.

A fresh process with every large block mapped on its own, so that memory freed by one step is not taken for memory
the next one did not need.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import process
from .workload import Shape, Workload


@dataclass(frozen=True)
class Usage:
    """Bytes beyond q, k, v, the output and their gradients.

    `peak`: at most in use at any time. `saved`: kept between forward and backward. `seconds`: of that one call.
    """

    peak: int
    saved: int
    seconds: float


def measure(workloads: Sequence[Workload], threads: int) -> list[Usage]:
    """Run every workload once in a child process. Raises when it cannot be measured or does not survive."""
    if not process.can_measure_peak():
        raise RuntimeError("peak memory is read from /proc, which this system does not have.")
    request = json.dumps({"threads": threads, "workloads": [dataclasses.asdict(w) for w in workloads]})
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }
    done = subprocess.run(
        [sys.executable, "-m", "lotformer_paper.bench.peak"],
        input=request,
        capture_output=True,
        text=True,
        env=environment,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise RuntimeError(f"the measuring process ended with code {done.returncode}: {last[0]}")
    return [Usage(**usage) for usage in json.loads(done.stdout)]


def use(workload: Workload) -> Usage:
    """Measure one workload in this process."""
    dataclasses.replace(workload, shape=dataclasses.replace(workload.shape, n=min(64, workload.shape.n))).prepare()()
    q, k, v = workload.tokens()
    module = workload.module()
    forward = workload.forward(module)
    given: list[Tensor] = [q, k, v] if module is None else [q, k, v, *module.parameters(), *module.buffers()]
    upstream = torch.ones_like(v) if workload.backward else None
    before = process.resident()
    process.reset_peak()
    start = time.perf_counter()
    if upstream is None:
        with torch.no_grad():
            out = forward(q, k, v)
        accounted, saved = out.nbytes, 0
    else:
        kept: dict[int, int] = {}

        def note(x: Tensor) -> Tensor:
            storage = x.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            out = forward(q, k, v)
        for x in (*given, out):
            kept.pop(x.untyped_storage().data_ptr(), None)
        saved = sum(kept.values())
        out.backward(upstream)
        accounted = out.nbytes + sum(x.nbytes for x in (q, k, v))
    seconds = time.perf_counter() - start
    return Usage(peak=max(process.peak() - before - accounted, 0), saved=saved, seconds=seconds)


def main() -> None:
    request = json.load(sys.stdin)
    torch.set_num_threads(request["threads"])
    workloads = (Workload(**spec | {"shape": Shape(**spec["shape"])}) for spec in request["workloads"])
    json.dump([dataclasses.asdict(use(workload)) for workload in workloads], sys.stdout)


if __name__ == "__main__":
    main()
