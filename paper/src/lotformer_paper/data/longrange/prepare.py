"""From a source to a prepared set: shards in parallel, each made once, then joined and published."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Protocol

from .store import MANIFEST, PreparedSet, Shard, open_set, publish

OnShard = Callable[[int, int], None]
"""Called with the number of shards that are done, and of all shards."""

_SHARDS_PER_PROCESS = 2  # for fewer, starting a process takes longer than the work


class Source(Protocol):
    """A task's examples in shards, which can be made in any order and in any process.

    A shard depends on nothing but the source's own fields and its number, so what is prepared does not depend on the
    number of processes or on interruptions. A source is sent to processes, so it must be picklable and small.
    """

    @property
    def task(self) -> str:
        """Name of the task, with which the folder of the set begins."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """Splits that are the same as another one."""

    def describe(self) -> dict[str, Any]:
        """Plain data that determines the contents; another description is another set."""

    def shards(self) -> Mapping[str, int]:
        """The number of shards of each split."""

    def make(self, split: str, number: int) -> Shard:
        """One shard."""


def prepare(
    source: Source, root: Path, *, workers: int | None = None, listener: OnShard = lambda done, total: None
) -> PreparedSet:
    """The prepared set of a source under `root`, made now unless it is there.

    An interrupted run goes on with the shards it has not made. `workers` is the number of processes, all cores by
    default; with 1 the work is done in this one.
    """
    description = source.describe()  # reads the files of the source: once
    target = _folder_of(source.task, description, root)
    if (target / MANIFEST).is_file():
        return open_set(target)
    scratch = target.with_name(f"{target.name}.shards")
    scratch.mkdir(parents=True, exist_ok=True)
    paths = {
        split: [scratch / f"{split}-{number:05d}.npz" for number in range(count)]
        for split, count in source.shards().items()
    }
    missing = [
        (split, number, path)
        for split, parts in paths.items()
        for number, path in enumerate(parts)
        if not path.is_file()
    ]
    total = sum(len(parts) for parts in paths.values())
    listener(total - len(missing), total)
    try:
        for done, _ in enumerate(_made(source, missing, workers), total - len(missing) + 1):
            listener(done, total)
        publish(target, paths, source.aliases, description)
    except FileNotFoundError:
        # another process has published the set and removed the shards while this one was at work
        if not (target / MANIFEST).is_file():
            raise
    shutil.rmtree(scratch, ignore_errors=True)
    return open_set(target)


def _folder_of(task: str, description: Mapping[str, Any], root: Path) -> Path:
    text = json.dumps(description, sort_keys=True)
    return root / f"{task}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _made(source: Source, missing: list[tuple[str, int, Path]], workers: int | None) -> Iterator[None]:
    workers = min(workers or os.cpu_count() or 1, len(missing) // _SHARDS_PER_PROCESS)
    if workers <= 1:
        for split, number, path in missing:
            _make(source, split, number, path)
            yield
        return
    pool = ProcessPoolExecutor(workers, mp_context=_context())
    try:
        for finished in as_completed([pool.submit(_make, source, *part) for part in missing]):
            yield finished.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _context() -> Any:
    """Processes that do not inherit the threads of this one, whose state would be undefined.

    Where there is a fork server, it imports PyTorch once for all of them.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _make(source: Source, split: str, number: int, path: Path) -> None:
    source.make(split, number).save(path)
