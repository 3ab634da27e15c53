"""The length from which LOT is faster than fused softmax, measured on this machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ...attention.config import LOTConfig
from ...attention.lot import LOT

_SIDES = (8, 10, 11, 13, 16, 19, 23, 27, 32, 38, 45, 54, 64)
"""Inputs are as long as squares, so that they are grids, too: 64 to 4096 tokens."""

_SECONDS = 0.45
_CALLS = (2, 400)  # at least and at most, whatever time they take
_CLEAR, _SOON = 1.5, 8  # a gain that needs no more calls than so many
_GAIN = 1.05  # less than that is not worth another function than the original's


def break_even(num_heads: int, head_dim: int, config: LOTConfig, like: Tensor) -> int:
    """Up to how many tokens PyTorch's fused softmax takes less time than LOT for one sample; 0 to 4096.

    One sample, because what LOT costs beside its products weighs most there. By bisection, in less than two seconds;
    measured once per process for each shape, precision and device. On a CPU by one thread: both divide their work
    among threads alike, and waiting for each other on a busy machine tells nothing about them. The random numbers of
    the caller stay as they are.

    Args:
        like: a parameter of the model: precision and device.
    """
    config = replace(config, softmax_up_to=0, pivots=replace(config.pivots, init="unit"))
    device = "cpu" if like.device.type == "meta" else str(like.device)
    return _measured(num_heads, head_dim, config, device, like.dtype)


@cache
def _measured(num_heads: int, head_dim: int, config: LOTConfig, device: str, dtype: torch.dtype) -> int:
    generator = torch.Generator().manual_seed(0)
    # initial values are the caller's random numbers, and a device may be set around this
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.inference_mode(), _one_thread():
        lot = LOT(head_dim, num_heads, config).to(device, dtype).eval()
        gains: dict[int, float] = {}

        def gain(index: int) -> float:
            grid = (_SIDES[index], _SIDES[index])
            shape = (3, 1, num_heads, config.prefix_tokens + grid[0] ** 2, head_dim)
            q, k, v = torch.randn(shape, generator=generator).to(device, dtype)
            gains[index] = _ratio(lambda: F.scaled_dot_product_attention(q, k, v), lambda: lot(q, k, v, grid=grid))
            return gains[index]

        low, high = -1, len(_SIDES)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if gain(middle) >= _GAIN else (middle, high)
    if low < 0:
        return 0
    if high == len(_SIDES):
        return _SIDES[low] ** 2
    before, after = (math.log(gains[index] / _GAIN) for index in (low, high))
    share = -before / (after - before) if after > before else 1.0
    return round(_SIDES[low] ** (2 * (1 - share)) * _SIDES[high] ** (2 * share))


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _ratio(softmax: Callable[[], Tensor], lot: Callable[[], Tensor]) -> float:
    """The speed of LOT relative to softmax: in turns, best of many."""
    best = [math.inf, math.inf]
    runs = (softmax, lot)
    on_cpu = softmax().device.type == "cpu"
    lot()
    start, calls = time.perf_counter(), 0
    while calls < _CALLS[0] or (calls < _CALLS[1] and time.perf_counter() - start < _SECONDS):
        for index, run in enumerate(runs):
            best[index] = min(best[index], _seconds(run, on_cpu))
        calls += 1
        if calls >= _SOON and best[0] / best[1] >= _CLEAR:
            break
    return best[0] / best[1]


def _seconds(run: Callable[[], Tensor], on_cpu: bool) -> float:
    """On a CPU the time that it has worked on this thread: whatever else runs there does not count."""
    clock = time.thread_time if on_cpu else time.perf_counter
    start = clock()
    run()
    if not on_cpu:
        torch.accelerator.synchronize()
    return clock() - start
