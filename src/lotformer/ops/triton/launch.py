"""From tensors to launches: block sizes, buffers, and the order of the passes.

Two strategies. "fused" runs all sweeps of a head in one program: forward is one launch (Newton: five), backward six
(Newton: eight), whatever the number of sweeps. "passes" takes a launch for every pass and serves any length.

Scores are formed again from the tokens in every pass: a token costs `D` numbers of its own dtype to read. A kept row
of scores would cost `R` fp32 numbers to read and to write, and `N·R` numbers of memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import triton
from torch import Tensor

from ..newton import FIXED_PASSES, MAX_PASSES
from . import fused, newton_passes, passes

Strategy = Literal["fused", "passes"]
Options = dict[str, int]
Launcher = Callable[[Any, tuple[int, ...], dict[str, Any], Options], None]

FUSED_TILE = 8192
"""Scores a program may hold: 32 registers a thread for each tile alive."""

FUSED_RANK = 64  # above, a program per head would spill
_NEWTON_RANK = 32  # the same for the exact solve
_BLOCK_K = 16
_MOST_CHUNKS = 64
_SMALLEST_CHUNK = 128
_FLOOR = 2e-7  # fp32 cannot tell residuals below


class Inputs(NamedTuple):
    """What the kernels are given: `z` are pivots times `scale / eps`, `log_m` and `log_a` normalised, all fp32.

    q `(B,H,N,D)`, k `(B,H,M,D)`, v `(B,H,M,Dv)`, z `(H,R,D)`, log_m `(H,R)`; log masses `(B, 1 or H, N or M)` or None
    for uniform ones; validity as uint8, `(B,1,N)` and `(B, 1 or H, M)`, or None; `tol` None for a fixed cost.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    z: Tensor
    log_m: Tensor
    query_log_a: Tensor | None
    key_log_a: Tensor | None
    query_valid: Tensor | None
    key_valid: Tensor | None
    newton: bool
    iters: int
    tol: float | None

    @property
    def heads(self) -> int:
        return self.q.shape[0] * self.q.shape[1]

    @property
    def slots(self) -> int:
        return 2 if self.newton else self.iters + 1

    @property
    def rank(self) -> int:
        return self.z.shape[1]


def strategy_for(n: int, m: int, rank: int) -> Strategy:
    """Fused if every score of a head fits on chip."""
    fits = rank <= FUSED_RANK and _block(max(n, m)) * _block(rank) <= FUSED_TILE
    return "fused" if fits else "passes"


def launch(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], options: Options) -> None:
    device = next(x.device for x in arguments.values() if isinstance(x, Tensor))
    if device.type == "cpu":  # Triton's interpreter
        kernel[grid](**arguments, **options)
    else:
        with torch.cuda.device(device):
            kernel[grid](**arguments, **options)


def forward(
    inputs: Inputs, strategy: Strategy, run: Launcher = launch
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output `(B,H,N,Dv)`, query and key potentials `(B,H,slots,R)`, `u = Wᵀ v` `(B,H,R,Dv)`."""
    batch, heads, n, _ = inputs.q.shape
    width, rank = inputs.v.shape[3], inputs.rank
    out = inputs.q.new_empty(batch, heads, n, width)
    query_g = inputs.z.new_empty(batch, heads, inputs.slots, rank)
    key_g = torch.empty_like(query_g)
    u = inputs.z.new_empty(batch, heads, rank, width)
    if strategy == "fused" and not inputs.newton:
        _fused_forward(inputs, out, query_g, key_g, u, run)
    else:
        _passes_forward(inputs, strategy, out, query_g, key_g, u, run)
    return out, query_g, key_g, u


class Gradients(NamedTuple):
    """Gradients of the first inputs, in their order; of the log masses `(B,H,N or M)`, None where not asked for."""

    q: Tensor
    k: Tensor
    v: Tensor
    z: Tensor
    log_m: Tensor
    query_log_a: Tensor | None
    key_log_a: Tensor | None


def backward(
    inputs: Inputs,
    strategy: Strategy,
    potentials: tuple[Tensor, Tensor],
    u: Tensor,
    grad_out: Tensor,
    *,
    mass_gradients: tuple[bool, bool],
    run: Launcher = launch,
) -> Gradients:
    batch, heads, n, depth = inputs.q.shape
    m, width, rank = inputs.k.shape[2], inputs.v.shape[3], inputs.rank
    grads = Gradients(
        q=inputs.q.new_empty(batch, heads, n, depth),
        k=inputs.k.new_empty(batch, heads, m, depth),
        v=inputs.v.new_empty(batch, heads, m, width),
        z=inputs.z.new_zeros(heads, rank, depth),
        log_m=inputs.z.new_zeros(heads, rank),
        query_log_a=inputs.z.new_empty(batch, heads, n) if mass_gradients[0] else None,
        key_log_a=inputs.z.new_empty(batch, heads, m) if mass_gradients[1] else None,
    )
    grad_out = _rows(grad_out)
    query_y, key_y = (torch.zeros_like(g) for g in potentials)
    _backward(inputs, strategy, potentials, u, grad_out, (query_y, key_y), grads, run)
    both = (query_y + key_y).sum(0)
    grads.log_m.copy_(both[:, 0] * inputs.log_m.exp() if inputs.newton else both.sum(1))
    return grads


def _block(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _rows(x: Tensor) -> Tensor:
    """Kernels read rows at any stride, the numbers of a row side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def precision() -> str:
    """Scores in full fp32: three TF32 products on NVIDIA's tensor cores, plain fp32 products elsewhere."""
    return "ieee" if torch.version.hip else "tf32x3"


def _tolerance(inputs: Inputs) -> float:
    return -1.0 if inputs.tol is None else max(inputs.tol / 3, _FLOOR)


@dataclass(frozen=True)
class _Side:
    """The tokens of one side, with their masses and strides under the names the kernels use."""

    x: Tensor
    log_a: Tensor | None
    valid: Tensor | None

    @property
    def tokens(self) -> int:
        return self.x.shape[2]

    @property
    def uniform(self) -> float:
        return -math.log(self.tokens)

    def strides(self, x: str, *, masses: str = "a", valid: str = "valid") -> dict[str, int]:
        a_b, a_h = _broadcast_strides(self.log_a)
        valid_b, valid_h = _broadcast_strides(self.valid)
        x_b, x_h, x_n, _ = self.x.stride()
        return {
            f"{x}_b": x_b, f"{x}_h": x_h, f"{x}_n": x_n, f"{masses}_b": a_b, f"{masses}_h": a_h,
            f"{valid}_b": valid_b, f"{valid}_h": valid_h,
        }  # fmt: skip


def _broadcast_strides(x: Tensor | None) -> tuple[int, int]:
    if x is None:
        return 0, 0
    return x.stride(0), x.stride(1) if x.shape[1] > 1 else 0


def _sides(inputs: Inputs) -> tuple[_Side, _Side]:
    return (
        _Side(inputs.q, inputs.query_log_a, inputs.query_valid),
        _Side(inputs.k, inputs.key_log_a, inputs.key_valid),
    )


def _value_strides(v: Tensor) -> dict[str, int]:
    return {"v_b": v.stride(0), "v_h": v.stride(1), "v_n": v.stride(2)}


def _out_strides(x: Tensor) -> dict[str, int]:
    return {"out_b": x.stride(0), "out_h": x.stride(1), "out_n": x.stride(2)}


@dataclass(frozen=True)
class Blocks:
    """Block sizes by rank and strategy, chosen so that no kernel spills on any architecture; see `resources`."""

    r: int

    @staticmethod
    def of(rank: int) -> Blocks:
        return Blocks(_block(rank))

    @property
    def n(self) -> int:
        return max(16, min(32, 2048 // self.r))

    @property
    def options(self) -> Options:
        options = {"num_warps": 8, "num_stages": 1}
        # left alone, NVIDIA's assembler spills a few bytes to run more programs side by side
        return options if torch.version.hip else {**options, "maxnreg": 255}

    def d(self, depth: int) -> int:
        """How much of the depth a program sums up at once."""
        return max(32, min(_block(depth), 2048 // self.r))


# one program for each head


def _fused_forward(inputs: Inputs, out: Tensor, query_g: Tensor, key_g: Tensor, u: Tensor, run: Launcher) -> None:
    queries, keys = _sides(inputs)
    z, blocks = inputs.z, Blocks.of(inputs.rank)
    strides = queries.strides("q", masses="query_a", valid="query_valid")
    strides |= keys.strides("k", masses="key_a", valid="key_valid") | _value_strides(inputs.v)
    del strides["query_valid_h"]  # queries are masked for all heads alike
    arguments = {
        "q": inputs.q, "k": inputs.k, "v": inputs.v, "z": z, "log_m": inputs.log_m,
        "query_log_a": _or(queries.log_a, z), "key_log_a": _or(keys.log_a, z),
        "query_valid": _or(queries.valid, z), "key_valid": _or(keys.valid, z),
        "out": out, "query_g": query_g, "key_g": key_g, "u": u, **strides,
        "heads": inputs.q.shape[1], "n": queries.tokens, "m": keys.tokens, "rank": inputs.rank,
        "depth": inputs.q.shape[3], "width": inputs.v.shape[3], "iters": inputs.iters,
        "query_uniform": queries.uniform, "key_uniform": keys.uniform,
        "QUERY_MASS": queries.log_a is not None, "KEY_MASS": keys.log_a is not None,
        "QUERY_VALID": queries.valid is not None, "KEY_VALID": keys.valid is not None,
        "QUERY_TILE": _block(queries.tokens), "KEY_TILE": _block(keys.tokens),
        "BLOCK_N": blocks.n, "BLOCK_R": blocks.r, "BLOCK_K": _BLOCK_K, "BLOCK_D": blocks.d(inputs.v.shape[3]),
        "PRECISION": precision(),
    }  # fmt: skip
    run(fused.forward_kernel, (inputs.heads,), arguments, blocks.options)


def _or(x: Tensor | None, placeholder: Tensor) -> Tensor:
    """Kernels take a pointer in any case and do not follow the placeholder."""
    return placeholder if x is None else x


# a launch for each pass over the tokens


class _Passes:
    """The launches over one side's tokens: the arguments they share, and how they are cut into chunks."""

    def __init__(self, inputs: Inputs, side: _Side, run: Launcher) -> None:
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
            x: side.x, "z": inputs.z, "log_m": inputs.log_m,
            "log_a_ptr": _or(side.log_a, inputs.z), "valid": _or(side.valid, inputs.z), **side.strides(x),
            "heads": inputs.q.shape[1], "tokens": side.tokens, "rank": inputs.rank, "depth": side.x.shape[3],
            "slots": inputs.slots, "chunk": self.chunk, "chunks": self.chunks, "uniform": side.uniform,
            "HAS_MASS": side.log_a is not None, "HAS_VALID": side.valid is not None,
            "BLOCK_N": self.blocks.n, "BLOCK_R": self.blocks.r, "BLOCK_K": _BLOCK_K, "PRECISION": precision(),
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
            "iters": self.inputs.iters, "KEYS": keys, "TILE": _block(self.side.tokens),
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


def _passes_forward(
    inputs: Inputs, strategy: Strategy, out: Tensor, query_g: Tensor, key_g: Tensor, u: Tensor, run: Launcher
) -> None:
    queries, keys = (_Passes(inputs, side, run) for side in _sides(inputs))
    width, rank, reduce = inputs.v.shape[3], inputs.rank, not inputs.newton
    if not inputs.newton:
        read, query_read = keys.sinkhorn(key_g, keys=True), queries.sinkhorn(query_g, keys=False)
    else:
        in_one = strategy == "fused" and rank <= _NEWTON_RANK
        for side, g in ((keys, key_g), (queries, query_g)):
            (side.newton_in_one if in_one else side.newton)(g)
        read = query_read = key_g  # there is nothing left to reduce
    block_d = keys.blocks.d(width)
    blocks = -(-width // block_d)
    sums, u_partials = keys.buffer(2, rank), keys.buffer(rank, width)
    arguments = {
        "v": inputs.v, "potentials": key_g, "partials_in": read, "partials_out": sums, "u_partials": u_partials,
        "width": width, "slot": inputs.slots - 2, "REDUCE": reduce, "BLOCK_D": block_d, **_value_strides(inputs.v),
    }  # fmt: skip
    keys.over_tokens(passes.values_kernel, arguments, x="k", depth_blocks=blocks)
    arguments = {"partials": sums, "u_partials": u_partials, "potentials": key_g, "u": u}
    keys.over_heads(passes.combine_kernel, {**arguments, "width": width, "BLOCK_D": block_d}, depth_blocks=blocks)
    arguments = {"potentials": query_g, "partials": query_read, "u": u, "out": out, "width": width}
    last = {"slot": inputs.slots - 1, "REDUCE": reduce}
    queries.over_tokens(passes.output_kernel, {**arguments, **last}, x="q")


def _backward(
    inputs: Inputs, strategy: Strategy, potentials: tuple[Tensor, Tensor], u: Tensor, grad_out: Tensor,
    grad_potentials: tuple[Tensor, Tensor], grads: Gradients, run: Launcher,
) -> None:  # fmt: skip
    queries, keys = (_Passes(inputs, side, run) for side in _sides(inputs))
    batch, heads, _, depth = inputs.q.shape
    width, rank = inputs.v.shape[3], inputs.rank
    shared = {"u": u, "width": width, "iters": inputs.iters, "NEWTON": inputs.newton}
    block_d = queries.blocks.d(width)
    y_partials, u_partials = queries.buffer(rank), queries.buffer(rank, width)
    arguments = {
        **shared, "potentials": potentials[0], "grad_out": grad_out, "y_partials": y_partials,
        "u_partials": u_partials, "BLOCK_D": block_d, **_out_strides(grad_out),
    }  # fmt: skip
    queries.over_tokens(passes.backward_output_kernel, arguments, x="q", depth_blocks=-(-width // block_d))
    grad_u = u_partials.sum(1)
    shared["grad_u"] = grad_u

    def tokens(side: _Passes, index: int, grad_x: Tensor, grad_log_a: Tensor | None) -> None:
        block_d = side.blocks.d(depth)
        z_partials = side.buffer(rank, depth)
        arguments = {
            **shared, "potentials": potentials[index], "grad_potentials": grad_potentials[index],
            "v": inputs.v, "grad_out": grad_out, "grad_x": grad_x, "grad_v": grads.v,
            "grad_log_a": _or(grad_log_a, inputs.z), "z_partials": z_partials, "KEYS": index == 1,
            "MASS_GRADIENT": grad_log_a is not None, "BLOCK_D": block_d,
            **_value_strides(inputs.v), **_out_strides(grad_out),
        }  # fmt: skip
        side.over_tokens(passes.backward_tokens_kernel, arguments, depth_blocks=-(-depth // block_d))
        grads.z.add_(z_partials.view(batch, heads, -1, rank, depth).sum((0, 2)))

    def solve(side: _Passes, index: int, y_partials: Tensor) -> None:
        buffers = (potentials[index], y_partials, grad_potentials[index])
        if inputs.newton:
            side.implicit(*buffers)
        else:
            (side.reverse_in_one if strategy == "fused" else side.reverse)(*buffers, keys=index == 1)

    solve(queries, 0, y_partials)
    tokens(queries, 0, grads.q, grads.query_log_a)

    y_partials = keys.buffer(rank)
    arguments = {
        **shared, "v": inputs.v, "potentials": potentials[1], "y_partials": y_partials, **_value_strides(inputs.v),
    }  # fmt: skip
    keys.over_tokens(passes.backward_values_kernel, arguments, x="k")
    solve(keys, 1, y_partials)
    tokens(keys, 1, grads.k, grads.key_log_a)
