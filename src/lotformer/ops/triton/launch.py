"""From tensors to launches: block sizes, buffers, and the order of the passes.

Two strategies. "fused" runs all sweeps of a head in one program: forward is one launch (Newton: five), backward six
(Newton: eight), whatever the number of sweeps. "passes" takes a launch for every pass and serves any length.

Scores are formed again from the tokens in every pass: a token costs `D` numbers of its own dtype to read. A kept row
of scores would cost `R` fp32 numbers to read and to write, and `N·R` numbers of memory. Scores that are given are read.

Where the queries are not solved, all they do depends on `s + log m`: the gradient of `log m` is the column sums of that
of their scores.
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
from ..problem import LEAST_LOG_MASS
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

    q `(B,H,N,D)`, k `(B,H,M,D)`, v `(B,H,M,Dv)`, z `(H,R,D)` or `(B,H,R,D)`, log_m `(H,R)`; log masses
    `(B, 1 or H, N or M)` or None for uniform ones; validity as uint8, `(B,1,N)` and `(B, 1 or H, M)`, or None; `tol`
    None for a fixed cost. If q and k are scores, D is R and z is `scale / eps (H,)`.
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
    balance: str

    @property
    def heads(self) -> int:
        return self.q.shape[0] * self.q.shape[1]

    @property
    def rank(self) -> int:
        return self.log_m.shape[1]

    @property
    def slots(self) -> tuple[int, int]:
        """How many potentials are kept of the queries and of the keys; `fused` says which."""
        solved = 2 if self.newton else self.iters + 1
        return {"both": (solved, solved), "keys": (2, solved), "none": (1, 1)}[self.balance]

    @property
    def plan_slots(self) -> tuple[int, int]:
        """The slots that the two plans are made of; -1 for keys that are not solved."""
        queries, keys = self.slots
        return queries - 1 if self.balance == "both" else 0, keys - 2

    @property
    def depth(self) -> int | None:
        """Of a token; None if scores are given."""
        return None if self.z.dim() == 1 else self.z.shape[-1]


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
    out, query_g, key_g, u = outputs(inputs)
    if strategy == "fused" and not inputs.newton:
        _fused_forward(inputs, out, query_g, key_g, u, run)
    else:
        _passes_forward(inputs, strategy, out, query_g, key_g, u, run)
    return out, query_g, key_g, u


def outputs(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `forward` fills."""
    batch, heads, n, _ = inputs.q.shape
    width, rank = inputs.v.shape[3], inputs.rank
    query_g, key_g = (inputs.z.new_empty(batch, heads, slots, rank) for slots in inputs.slots)
    return inputs.q.new_empty(batch, heads, n, width), query_g, key_g, inputs.z.new_empty(batch, heads, rank, width)


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
    grads = Gradients(
        q=inputs.q.new_empty(inputs.q.shape),
        k=inputs.k.new_empty(inputs.k.shape),
        v=inputs.v.new_empty(inputs.v.shape),
        z=torch.zeros_like(inputs.z),
        log_m=torch.zeros_like(inputs.log_m),
        query_log_a=inputs.z.new_empty(inputs.q.shape[:3]) if mass_gradients[0] else None,
        key_log_a=inputs.z.new_empty(inputs.k.shape[:3]) if mass_gradients[1] else None,
    )
    _backward(inputs, strategy, potentials, u, _rows(grad_out), grads, run)
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
class _Tokens:
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


@dataclass(frozen=True)
class _Side(_Tokens):
    """And how they are solved.

    Attributes:
        log_m: masses of the pivots that the side is solved for, `(H,R)` or `(B,H,R)`.
        slots: how many potentials are kept. slot: that of which the plan is made.
        sweeps: how many lie between the first slot and the last that has a gradient.
    """

    log_m: Tensor
    solved: bool
    slots: int
    slot: int
    sweeps: int


def _broadcast_strides(x: Tensor | None) -> tuple[int, int]:
    if x is None:
        return 0, 0
    return x.stride(0), x.stride(1) if x.shape[1] > 1 else 0


def _queries(inputs: Inputs) -> _Side:
    slots, slot = inputs.slots[0], inputs.plan_slots[0]
    tokens = (inputs.q, inputs.query_log_a, inputs.query_valid)
    return _Side(*tokens, inputs.log_m, inputs.balance == "both", slots, slot, sweeps=slots - 1)


def _keys(inputs: Inputs, query_g: Tensor) -> _Side:
    """The keys as the queries' potentials leave them."""
    slots, slot = inputs.slots[1], inputs.plan_slots[1]
    log_m = _normalised(inputs, _sent(inputs, query_g)) if inputs.balance == "keys" else inputs.log_m
    tokens = (inputs.k, inputs.key_log_a, inputs.key_valid)
    return _Side(*tokens, log_m, inputs.balance != "none", slots, slot, sweeps=max(slot, 0))


def _sent(inputs: Inputs, query_g: Tensor) -> Tensor:
    """`log m' (B,H,R)`, what queries that are not solved send: a sweep makes `2 log m - log m'` of `log m`."""
    return 2 * inputs.log_m - query_g[:, :, 1]


def _normalised(inputs: Inputs, log_sent: Tensor) -> Tensor:
    return log_sent.clamp_min(_least(inputs)).log_softmax(-1)


def _least(inputs: Inputs) -> float:
    return LEAST_LOG_MASS["newton" if inputs.newton else "sinkhorn"]


def _pivot_strides(z: Tensor) -> dict[str, int]:
    return {"z_b": z.stride(0) if z.dim() == 4 else 0, "z_h": 1 if z.dim() == 1 else z.stride(-3)}


def _mass_stride(log_m: Tensor) -> dict[str, int]:
    return {"m_b": log_m.stride(0) if log_m.dim() == 3 else 0}


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
    queries = _Tokens(inputs.q, inputs.query_log_a, inputs.query_valid)
    keys = _Tokens(inputs.k, inputs.key_log_a, inputs.key_valid)
    z, blocks = inputs.z, Blocks.of(inputs.rank)
    strides = (
        _pivot_strides(z) | _mass_stride(inputs.log_m) | queries.strides("q", masses="query_a", valid="query_valid")
    )
    strides |= keys.strides("k", masses="key_a", valid="key_valid") | _value_strides(inputs.v)
    del strides["query_valid_h"]  # queries are masked for all heads alike
    arguments = {
        "q": inputs.q, "k": inputs.k, "v": inputs.v, "z": z, "log_m": inputs.log_m,
        "query_log_a": _or(queries.log_a, z), "key_log_a": _or(keys.log_a, z),
        "query_valid": _or(queries.valid, z), "key_valid": _or(keys.valid, z),
        "out": out, "query_g": query_g, "key_g": key_g, "u": u, **strides,
        "heads": inputs.q.shape[1], "n": queries.tokens, "m": keys.tokens, "rank": inputs.rank,
        "depth": inputs.depth, "width": inputs.v.shape[3], "iters": inputs.iters,
        "query_uniform": queries.uniform, "key_uniform": keys.uniform, "BALANCE": inputs.balance,
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
            x: side.x, "z": inputs.z, "log_m": side.log_m,
            "log_a_ptr": _or(side.log_a, inputs.z), "valid": _or(side.valid, inputs.z), **side.strides(x),
            **_pivot_strides(inputs.z), **_mass_stride(side.log_m),
            "heads": inputs.q.shape[1], "tokens": side.tokens, "rank": inputs.rank, "depth": inputs.depth,
            "slots": side.slots, "slot": side.slot, "sweeps": side.sweeps, "chunk": self.chunk, "chunks": self.chunks,
            "uniform": side.uniform, "SOLVED": side.solved, "HAS_MASS": side.log_a is not None, "HAS_VALID": side.valid is not None,
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

    def send(self, potentials: Tensor) -> None:
        """One sweep from `log m`, into the first two slots: what queries that are not solved send, see `_sent`."""
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
    queries = _Passes(inputs, _queries(inputs), run)
    if inputs.balance == "keys":
        queries.send(query_g)
    elif inputs.balance == "none":
        query_g[:, :, 0] = inputs.log_m
    keys = _Passes(inputs, _keys(inputs, query_g), run)
    read = [query_g, key_g]  # what is left to reduce, if anything
    for i, (side, g) in enumerate(((queries, query_g), (keys, key_g))):
        if side.side.solved and not inputs.newton:
            read[i] = side.sinkhorn(g, keys=side is keys)
        elif side.side.solved:
            in_one = strategy == "fused" and inputs.rank <= _NEWTON_RANK
            (side.newton_in_one if in_one else side.newton)(g)
    width, rank = inputs.v.shape[3], inputs.rank
    block_d = keys.blocks.d(width)
    blocks = -(-width // block_d)
    sums, u_partials = keys.buffer(2, rank), keys.buffer(rank, width)
    arguments = {
        "v": inputs.v, "potentials": key_g, "partials_in": read[1], "partials_out": sums, "u_partials": u_partials,
        "width": width, "REDUCE": read[1] is not key_g, "BLOCK_D": block_d, **_value_strides(inputs.v),
    }  # fmt: skip
    keys.over_tokens(passes.values_kernel, arguments, x="k", depth_blocks=blocks)
    arguments = {"partials": sums, "u_partials": u_partials, "potentials": key_g, "u": u}
    keys.over_heads(passes.combine_kernel, {**arguments, "width": width, "BLOCK_D": block_d}, depth_blocks=blocks)
    arguments = {"potentials": query_g, "partials": read[0], "u": u, "out": out, "width": width}
    queries.over_tokens(passes.output_kernel, {**arguments, "REDUCE": read[0] is not query_g}, x="q")


def _backward(
    inputs: Inputs, strategy: Strategy, potentials: tuple[Tensor, Tensor], u: Tensor, grad_out: Tensor,
    grads: Gradients, run: Launcher,
) -> None:  # fmt: skip
    queries, keys = (_Passes(inputs, side, run) for side in (_queries(inputs), _keys(inputs, potentials[0])))
    query_y, key_y = (torch.zeros_like(g) for g in potentials)  # gradients of the potentials
    width, rank, depth = inputs.v.shape[3], inputs.rank, inputs.depth
    shared = {"u": u, "width": width}
    block_d = queries.blocks.d(width)
    output_y, u_partials = queries.buffer(rank), queries.buffer(rank, width)
    arguments = {
        **shared, "potentials": potentials[0], "grad_out": grad_out, "y_partials": output_y,
        "u_partials": u_partials, "BLOCK_D": block_d, **_out_strides(grad_out),
    }  # fmt: skip
    queries.over_tokens(passes.backward_output_kernel, arguments, x="q", depth_blocks=-(-width // block_d))
    shared["grad_u"] = u_partials.sum(1)

    def solve(side: _Passes, g: Tensor, y_partials: Tensor, y: Tensor) -> None:
        if inputs.newton:
            side.implicit(g, y_partials, y)
        else:
            (side.reverse_in_one if strategy == "fused" else side.reverse)(g, y_partials, y, keys=side is keys)

    def tokens(side: _Passes, g: Tensor, y: Tensor, grad_x: Tensor, grad_log_a: Tensor | None) -> Tensor:
        """Store the gradients of a side's tokens, add to that of z, return the column sums of that of the scores."""
        block_d = side.blocks.d(depth or rank)
        z_partials = side.buffer(rank) if depth is None else side.buffer(rank, depth)
        sums = side.buffer(rank)
        arguments = {
            **shared, "potentials": g, "grad_potentials": y,
            "v": inputs.v, "grad_out": grad_out, "grad_x": grad_x, "grad_v": grads.v,
            "grad_log_a": _or(grad_log_a, inputs.z), "z_partials": z_partials, "sums": sums,
            "KEYS": side is keys, "NEWTON": inputs.newton and side.side.solved,
            "MASS_GRADIENT": grad_log_a is not None, "BLOCK_D": block_d,
            **_value_strides(inputs.v), **_out_strides(grad_out),
        }  # fmt: skip
        blocks = 1 if depth is None else -(-depth // block_d)
        side.over_tokens(passes.backward_tokens_kernel, arguments, depth_blocks=blocks)
        parts = z_partials.view(*inputs.q.shape[:2], *z_partials.shape[1:]).sum(2)
        grads.z.add_(parts.sum((0, 2)) if depth is None else parts.sum_to_size(inputs.z.shape))
        return sums.view(*inputs.q.shape[:2], -1, rank).sum((0, 2))

    if keys.side.solved:
        y_partials = keys.buffer(rank)
        arguments = {
            **shared, "v": inputs.v, "potentials": potentials[1], "y_partials": y_partials, **_value_strides(inputs.v),
        }  # fmt: skip
        keys.over_tokens(passes.backward_values_kernel, arguments, x="k")
        solve(keys, potentials[1], y_partials, key_y)
    tokens(keys, potentials[1], key_y, grads.k, grads.key_log_a)

    if inputs.balance == "both":
        solve(queries, potentials[0], output_y, query_y)
    elif inputs.balance == "keys":
        # back through `_normalised`; of what a sweep makes, the gradient is that of `log m'` with the other sign
        y = _of_log_m(inputs, keys.side.log_m, key_y)
        y = y - keys.side.log_m.exp() * y.sum(-1, keepdim=True)
        query_y[:, :, 1] = torch.where(_sent(inputs, potentials[0]) >= _least(inputs), -y, 0.0)
    sums = tokens(queries, potentials[0], query_y, grads.q, grads.query_log_a)
    both = _of_log_m(inputs, inputs.log_m, query_y + key_y).sum(0) if inputs.balance == "both" else sums
    grads.log_m.copy_(both)


def _of_log_m(inputs: Inputs, log_m: Tensor, y: Tensor) -> Tensor:
    """The gradient `(B,H,R)` of the log masses that a side is solved for, from those of its potentials."""
    return y[:, :, 0] * log_m.exp() if inputs.newton else y.sum(2)
