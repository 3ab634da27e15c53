"""Launches over the tokens of one side: the arguments they share, and the order of the passes of a solve.

Scores are formed again from the tokens in every pass: a token costs `D` numbers of its own dtype to read. A kept row
of scores would cost `R` fp32 numbers to read and to write, and `N·R` numbers of memory. Scores that are given are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..newton import FIXED_PASSES, MAX_PASSES
from . import fused, newton_passes, passes
from .arguments import given_or, mass_stride, pivot_strides, precision
from .inputs import Inputs
from .sides import Side
from .sizes import BLOCK_K, Blocks, Options, block

Launcher = Callable[[Any, tuple[int, ...], dict[str, Any], Options], None]

_MOST_CHUNKS = 64
_SMALLEST_CHUNK = 128
_FLOOR = 2e-7  # fp32 cannot tell residuals below


def launch(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], options: Options) -> None:
    device = next(x.device for x in arguments.values() if isinstance(x, Tensor))
    if device.type == "cpu":  # Triton's interpreter
        kernel[grid](**arguments, **options)
    else:
        with torch.cuda.device(device):
            kernel[grid](**arguments, **options)


class Passes:
    """The launches over one side's tokens: the arguments they share, and how they are cut into chunks."""

    def __init__(self, inputs: Inputs, side: Side, run: Launcher) -> None:
        self.inputs, self.side, self.run = inputs, side, run
        self.blocks = Blocks.of(inputs.rank)
        chunk = max(_SMALLEST_CHUNK, -(-side.tokens // _MOST_CHUNKS))
        self.chunk = -(-chunk // self.blocks.n) * self.blocks.n
        self.chunks = -(-side.tokens // self.chunk)

    def buffer(self, *numbers: int) -> Tensor:
        return self.inputs.z.new_empty(self.inputs.heads, self.chunks, *numbers)

    def over_tokens(
        self, kernel: Any, arguments: dict[str, Any], *, x: str = "x", depth_blocks: int = 1
    ) -> None:  # fmt: skip
        grid = (self.inputs.heads, self.chunks, depth_blocks)[: 2 if depth_blocks == 1 else 3]
        self._launch(kernel, grid, x, arguments)

    def _launch(self, kernel: Any, grid: tuple[int, ...], x: str, arguments: dict[str, Any]) -> None:
        """Add to the arguments what describes the side, as far as the kernel asks for it."""
        side, inputs = self.side, self.inputs
        arguments = {
            x: side.x, "z": inputs.z, "log_m": side.log_m,
            "log_a_ptr": given_or(side.log_a, inputs.z), "valid": given_or(side.valid, inputs.z), **side.strides(x),
            **pivot_strides(inputs.z), **mass_stride(side.log_m),
            "heads": inputs.q.shape[1], "tokens": side.tokens, "rank": inputs.rank, "depth": inputs.depth,
            "slots": side.slots, "slot": side.slot, "sweeps": side.sweeps, "chunk": self.chunk, "chunks": self.chunks,
            "uniform": side.uniform,
            "SOLVED": side.solved, "HAS_MASS": side.log_a is not None, "HAS_VALID": side.valid is not None,
            "BLOCK_N": self.blocks.n, "BLOCK_R": self.blocks.r, "BLOCK_K": BLOCK_K, "PRECISION": precision(),
            **arguments,
        }  # fmt: skip
        taken = {name: arguments[name] for name in kernel.arg_names}
        self.run(kernel, grid, taken, self.blocks.options)

    def over_heads(self, kernel: Any, arguments: dict[str, Any], *, depth_blocks: int = 1) -> None:
        grid = (self.inputs.heads, depth_blocks)[: 1 if depth_blocks == 1 else 2]
        self._launch(kernel, grid, "x", arguments)

    def sinkhorn(self, potentials: Tensor, *, keys: bool) -> Tensor:
        read, write = self.buffer(2, self.inputs.rank), self.buffer(2, self.inputs.rank)
        if not keys:
            potentials[:, :, 0].zero_()
        for i in range(self.inputs.iters):
            # slot of the potential that the pass starts from; the keys' first pass starts from tokens instead
            slot = i - 1 if keys else i
            first = {"FROM_TOKENS": keys and i == 0, "REDUCE": i > 0}
            buffers = {"potentials": potentials, "partials_in": read, "partials_out": write}
            self.over_tokens(passes.sweep_kernel, {**buffers, **first, "slot": slot})
            read, write = write, read
        return read

    def send(self, potentials: Tensor) -> None:
        """One sweep from `log m`, into the first two slots: what queries that are not solved send, see `log_sent`."""
        potentials[:, :, 0] = self.side.log_m
        sums = self.buffer(2, self.inputs.rank)
        buffers = {"potentials": potentials, "partials_in": sums, "partials_out": sums}
        self.over_tokens(passes.sweep_kernel, {**buffers, "FROM_TOKENS": False, "REDUCE": False})
        tops, totals = sums.view(*potentials.shape[:2], *sums.shape[1:]).unbind(3)
        potentials[:, :, 1] = self.side.log_m - torch.logsumexp(tops + totals.log(), 2)

    def newton_in_one(self, potentials: Tensor) -> None:
        passes_ = FIXED_PASSES if self.inputs.tol is None else MAX_PASSES
        # the r×r matrices leave registers for a smaller block only
        arguments = {"potentials": potentials, "tol": _tolerance(self.inputs), "passes": passes_, "BLOCK_N": 16}
        self.over_heads(fused.newton_kernel, arguments)

    def newton(self, potentials: Tensor) -> None:
        rank = self.inputs.rank
        state = self.inputs.z.new_empty(self.inputs.heads, 2 * rank + 3)
        start = self.buffer(rank + 1)
        self.over_tokens(newton_passes.newton_start_kernel, {"partials": start})
        self.over_heads(newton_passes.newton_begin_kernel, {"partials": start, "state": state})
        looked = self.buffer(rank, rank + 2)
        for i in range(FIXED_PASSES):
            self.look(state, looked, on_path=True)
            step = {"partials": looked, "state": state, "tol": _tolerance(self.inputs)}
            self.over_heads(newton_passes.newton_step_kernel, {**step, "last": int(i == FIXED_PASSES - 1)})
        self.look(state, looked, on_path=False)
        finish = {"partials": looked, "state": state, "potentials": potentials}
        self.over_heads(newton_passes.newton_finish_kernel, finish)

    def look(self, state: Tensor, looked: Tensor, *, on_path: bool) -> None:
        """Sums at the potential that each head's `state` begins with."""
        size = state.numel() // self.inputs.heads
        arguments = {"state": state, "partials": looked, "state_size": size, "ON_PATH": on_path}
        self.over_tokens(newton_passes.newton_look_kernel, arguments)

    def implicit(self, potentials: Tensor, y_partials: Tensor, grad_potentials: Tensor) -> None:
        looked = self.buffer(self.inputs.rank, self.inputs.rank + 2)
        self.look(potentials, looked, on_path=False)
        arguments = {"partials": looked, "y_partials": y_partials, "grad_potentials": grad_potentials}
        self.over_heads(newton_passes.implicit_kernel, arguments)

    def reverse_in_one(self, potentials: Tensor, y_partials: Tensor, grad_potentials: Tensor, *, keys: bool) -> None:
        arguments = {
            "potentials": potentials, "y_partials": y_partials, "grad_potentials": grad_potentials,
            "iters": self.inputs.iters, "KEYS": keys, "TILE": block(self.side.tokens),
        }  # fmt: skip
        self.over_heads(fused.backward_sweeps_kernel, arguments)

    def reverse(self, potentials: Tensor, y_partials: Tensor, grad_potentials: Tensor, *, keys: bool) -> None:
        """Gradients of the potentials, from the newest slot to the oldest."""
        newest = self.inputs.iters - 1 if keys else self.inputs.iters
        oldest = 0 if keys else 1
        read, write = y_partials, torch.empty_like(y_partials)
        for slot in range(newest - 1, oldest - 1, -1):
            buffers = {"partials_in": read, "partials_out": write, "grad_potentials": grad_potentials}
            self.over_tokens(passes.backward_sweep_kernel, {**buffers, "potentials": potentials, "slot": slot})
            read, write = write, read
        grad_potentials.view(self.inputs.heads, -1, self.inputs.rank)[:, oldest] = read.sum(1)


def _tolerance(inputs: Inputs) -> float:
    return -1.0 if inputs.tol is None else max(inputs.tol / 3, _FLOOR)
