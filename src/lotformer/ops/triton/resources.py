"""Resources that the kernels take of a GPU, found by compiling them ahead of time; no GPU is needed.

The launch code runs on tensors without storage and its launches are recorded instead of made, so that exactly the
kernels, argument types, block sizes and warps are compiled that a call would use.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ..problem import BALANCES
from .backward import backward
from .forward import forward
from .inputs import Inputs
from .sizes import FUSED_RANK, FUSED_TILE, Strategy, block

CUDA_ARCHITECTURES = (80, 90, 100)
DEPTHS = (32, 64, 128)
RANKS = (16, 32, 64, 128)

_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
}


@dataclass(frozen=True)
class Row:
    """Resources of one kernel: registers a thread, bytes of shared memory a block, bytes spilled a thread."""

    kernel: str
    arch: str
    depth: int
    rank: int
    solver: str
    warps: int
    registers: int
    shared: int
    stack: int


@dataclass(frozen=True)
class Launch:
    """A recorded launch, reduced to what decides the compiled code."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    options: tuple[tuple[str, int], ...]

    @property
    def warps(self) -> int:
        return dict(self.options)["num_warps"]

    @property
    def name(self) -> str:
        module = self.kernel.fn.__module__.rsplit(".", 1)[-1]
        return f"{module}.{self.kernel.fn.__name__.removesuffix('_kernel')}"


def record(
    depth: int,
    rank: int,
    *,
    newton: bool,
    strategy: Strategy,
    balance: str = "both",
    scores: bool = False,
    pivots_of_samples: bool = False,
    dtype: torch.dtype = torch.float32,
    masked: bool = False,
    tokens: int | None = None,
) -> list[Launch]:
    """The different launches of one forward and backward with head dim `depth` and `rank` pivots.

    If `scores`, they are given in place of queries and keys.
    """
    if tokens is None:
        tokens = FUSED_TILE // block(rank) if strategy == "fused" else 4096
    batch, heads = 2, 4

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    v = empty(batch, heads, tokens, depth, dtype=dtype)
    x = empty(batch, heads, tokens, rank, dtype=dtype) if scores else v
    log_a = empty(batch, 1, tokens) if masked else None
    valid = empty(batch, 1, tokens, dtype=torch.uint8) if masked else None
    z, log_m = empty(heads, rank, depth), empty(heads, rank)
    if scores:
        z = empty(heads)
    elif pivots_of_samples:
        z = empty(batch, heads, rank, depth)
    inputs = Inputs(x, x, v, z, log_m, log_a, log_a, valid, valid, newton, 5, 1e-6, balance)
    seen: dict[Launch, None] = {}

    def note(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], options: dict[str, int]) -> None:
        seen[_reduce(kernel, arguments, options)] = None

    _, query_g, key_g, u = forward(inputs, strategy, note)
    gradients = (masked, masked)
    backward(inputs, strategy, (query_g, key_g), u, v, mass_gradients=gradients, run=note)
    return list(seen)


def _reduce(kernel: Any, arguments: dict[str, Any], options: dict[str, int]) -> Launch:
    """The specialisations Triton itself makes: alignment to 16, and None and numbers equal to one as constants."""
    signature, constants, aligned = [], [], []
    for parameter in kernel.params:
        name, value = parameter.name, arguments[parameter.name]
        fixed = parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1 and not fixed):
            signature.append((name, "constexpr"))
            constants.append((name, value))
        elif isinstance(value, Tensor):
            signature.append((name, _POINTERS[value.dtype]))
            aligned.append(name)
        elif isinstance(value, float):
            signature.append((name, "fp32"))
        else:
            signature.append((name, "i32"))
            if value % 16 == 0 and not fixed:
                aligned.append(name)
    return Launch(kernel, tuple(signature), tuple(constants), tuple(aligned), tuple(options.items()))


def compile_for(launched: Launch, target: GPUTarget) -> Any:
    """Triton's compiled kernel for a target that need not be present."""
    if target.backend == "hip":
        plain = tuple((name, "ieee" if name == "PRECISION" else value) for name, value in launched.constants)
        options = tuple((name, value) for name, value in launched.options if name != "maxnreg")
        launched = replace(launched, constants=plain, options=options)
    position = {parameter.name: i for i, parameter in enumerate(launched.kernel.params)}
    attributes = {(position[name],): [["tt.divisibility", 16]] for name in launched.aligned}
    source = ASTSource(launched.kernel, dict(launched.signature), dict(launched.constants), attributes)
    return triton.compile(source, target=target, options=dict(launched.options))


def resources(compiled: Any) -> tuple[int, int, int]:
    """Registers, shared memory and stack of a kernel compiled for CUDA. A stack means that registers spill."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        command = [str(_cuobjdump()), "-res-usage", str(cubin)]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(_find(rf"{word}:(\d+)", usage)) for word in ("REG", "STACK"))
    return registers, int(compiled.metadata.shared), stack


def _find(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"cuobjdump: expected {pattern!r} in its answer, got {text!r}.")
    return match.group(1)


def _cuobjdump() -> Path:
    return Path(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")


def measure(
    archs: tuple[int, ...] = CUDA_ARCHITECTURES,
    depths: tuple[int, ...] = DEPTHS,
    ranks: tuple[int, ...] = RANKS,
    *,
    balances: tuple[str, ...] = BALANCES,
    scores: tuple[bool, ...] = (False, True),
    dtype: torch.dtype = torch.float32,
    masked: bool = False,
) -> Iterator[Row]:
    """Compile every kernel for every architecture, head dim and rank; kernels that do not differ only once.

    `scores`: whether they are given. Pivots of samples need no kernels of their own.
    """
    known: dict[tuple[Launch, int], tuple[int, int, int]] = {}
    for arch in archs:
        for depth in depths:
            for rank in ranks:
                for launched, solver in _every_launch(depth, rank, balances, scores, dtype, masked):
                    key = (launched, arch)
                    if key not in known:
                        known[key] = resources(compile_for(launched, GPUTarget("cuda", arch, 32)))
                    yield Row(launched.name, f"sm_{arch}", depth, rank, solver, launched.warps, *known[key])


def _every_launch(
    depth: int, rank: int, balances: tuple[str, ...], scores: tuple[bool, ...], dtype: torch.dtype, masked: bool
) -> Iterator[tuple[Launch, str]]:
    seen: set[Launch] = set()
    strategies: tuple[Strategy, ...] = ("fused", "passes") if rank <= FUSED_RANK else ("passes",)
    for strategy, newton, balance, given in itertools.product(strategies, (False, True), balances, scores):
        launches = record(
            depth,
            rank,
            newton=newton,
            strategy=strategy,
            balance=balance,
            scores=given,
            dtype=dtype,
            masked=masked,
        )
        for launched in launches:
            if launched not in seen:
                seen.add(launched)
                yield launched, "newton" if newton else "sinkhorn"


def as_table(rows: Iterable[Row]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and lines by kernel and rank: registers on each architecture, then the most shared memory in kB.

    Of the variants of a kernel (side, solver, balance, scores given or not, head dim) the one that takes most. Kernels
    that spill say so.
    """
    rows = list(rows)
    archs = sorted({row.arch for row in rows}, key=lambda arch: int(arch.removeprefix("sm_")))
    ranks = sorted({row.rank for row in rows})
    lines = []
    for kernel in dict.fromkeys(row.kernel for row in rows):
        cells = []
        for rank in ranks:
            these = [row for row in rows if row.kernel == kernel and row.rank == rank]
            registers = [max((row.registers for row in these if row.arch == arch), default=None) for arch in archs]
            shared = max((row.shared for row in these), default=0) / 1024
            numbers = " / ".join("?" if number is None else str(number) for number in registers)
            spilled = max((row.stack for row in these), default=0)
            cell = f"{numbers}, {shared:.1f} kB" + (f", SPILLS {spilled} B" if spilled else "")
            cells.append(cell if these else "not used")
        lines.append((kernel, *cells))
    return ("kernel", *(f"R = {rank}" for rank in ranks)), lines
