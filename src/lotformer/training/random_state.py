"""The global random number generators, which dropout and augmentation draw from: seed, save, restore."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_from(*numbers: int) -> int:
    """A seed of 63 bits from several numbers, e.g. a seed and an epoch; near numbers give unrelated seeds."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_everything(seed: int) -> None:
    """Seed the generators of torch (all devices), numpy and Python."""
    torch.manual_seed(seed)
    seed_host(seed)


def seed_host(seed: int) -> None:
    """The same without the generators of devices, which augmentation does not use."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  augmentations draw from numpy's global generator
    random.seed(seed)


def capture(devices: bool = True) -> dict[str, Any]:
    """The state of every global generator, as plain data and tensors."""
    name, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002
    state = {
        "torch": torch.get_rng_state(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "python": random.getstate(),
    }
    if devices and torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore(state: Mapping[str, Any]) -> None:
    """Put every generator back to where `capture` found it."""
    name, keys, *rest = state["numpy"]
    torch.set_rng_state(state["torch"])
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


@contextmanager
def isolated(seed: int) -> Iterator[None]:
    """While inside, all generators start from `seed`; outside, nobody notices."""
    before = capture()
    seed_everything(seed)
    try:
        yield
    finally:
        restore(before)
