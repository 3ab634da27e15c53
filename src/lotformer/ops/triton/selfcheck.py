"""The kernels against the reference on the device at hand, before they are trusted there.

They are compiled for the device by tools that are not ours. So before the first problem of a kind runs on a device and
in a dtype, a small one of that kind is solved both ways and compared, in values and in every gradient.
"""

from __future__ import annotations

import threading
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..problem import Solve, Transport
from . import op
from .sizes import Strategy, strategy_for

_BATCH, _HEADS, _RANK, _DIM = 2, 2, 5, 8
_TOKENS: dict[Strategy, tuple[int, int]] = {"fused": (9, 12), "passes": (9, 131)}  # keys in several chunks
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Relative errors allowed: a kernel that is wrong misses by more, and one that rounds by less."""

_agreed: set[tuple[Any, ...]] = set()
_refused: dict[tuple[str, torch.dtype], str] = {}
_lock = threading.Lock()


def why_distrusted(transport: Transport, solve: Solve) -> str | None:
    """The deviation of the kernels from the reference on this device and in this dtype, or None if they agree.

    The first deviation is told in a warning and rules the kernels out for this device and dtype.
    """
    x = transport.q
    if not torch.compiler.is_compiling() and isinstance(x, torch._subclasses.FakeTensor):
        return None  # nothing is computed
    strategy = strategy_for(x.shape[2], transport.k.shape[2], transport.rank)
    return _verdict(str(x.device), x.dtype, solve.solver, solve.balance, transport.pivots is None, strategy)


def _verdict(device: str, dtype: torch.dtype, *kind: Any) -> str | None:
    place, key = (device, dtype), (device, dtype, *kind)
    if place in _refused or key in _agreed:
        return _refused.get(place)
    if device.startswith("cuda") and torch.cuda.is_current_stream_capturing():
        warnings.warn(
            "a CUDA graph is captured of LOT attention in plain PyTorch: its kernels check themselves the first time "
            "they run, which no graph can hold. Run the layer once before the capture.",
            stacklevel=5,
        )
        return "they have not been checked, and cannot be during the capture of a CUDA graph."
    with _lock:
        if place not in _refused and key not in _agreed:
            _judge(device, dtype, kind)
    return _refused.get(place)


# `torch.compiler.assume_constant_result`, without importing the compiler: it calls the function while it traces
_verdict._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _judge(device: str, dtype: torch.dtype, kind: tuple[Any, ...]) -> None:
    deviation = _in_a_thread_of_its_own(device, dtype, kind)
    if deviation is None:
        _agreed.add((device, dtype, *kind))
        return
    _refused[device, dtype] = deviation
    warnings.warn(
        f"LOT attention runs in plain PyTorch on {device} for {dtype}: the 'triton' backend failed its self-check, "
        f'{deviation}. `backend="triton"` forces it.',
        stacklevel=7,
    )


def _in_a_thread_of_its_own(device: str, dtype: torch.dtype, kind: tuple[Any, ...]) -> str | None:
    """Grad mode, autocast, dispatch modes and the hooks of activation checkpointing are all those of a thread."""
    found: list[str | None] = []

    def check() -> None:
        try:
            found.append(deviation(torch.device(device), dtype, *kind))
        except Exception as error:  # compilers and drivers raise what they like
            found.append(f"it raised {type(error).__name__}: {error}")

    thread = threading.Thread(target=check, name="lotformer-selfcheck")
    thread.start()
    thread.join()
    return found[0]


def deviation(
    device: torch.device, dtype: torch.dtype, solver: Any, balance: Any, from_scores: bool, strategy: Strategy
) -> str | None:
    """The results that miss the reference by more than rounding, and by how much; None if there are none."""
    problem, solve = _problem(dtype, from_scores, strategy), Solve(0.5, solver, 3, 1e-6, None, balance)
    if from_scores:
        solve = solve._replace(scale=1.0)
    got = _outcome(partial(op.run, strategy=strategy), problem, solve, device, torch.float32, dtype)
    expected = _outcome(reference.run, problem, solve, torch.device("cpu"), torch.float64, torch.float64)
    for name, value in expected.items():
        error = ((got[name] - value).norm() / value.norm().clamp_min(1e-3)).item()
        if not error <= _TOLERANCE[dtype]:  # NaN deviates too
            kind = f"{solver}, balance {balance!r}, {'scores' if from_scores else 'tokens'}, {strategy}"
            allowed = f"{_TOLERANCE[dtype]:.0e}"
            return f"{name} deviates from the reference by {error:.1e} of its size (allowed: {allowed}; {kind})"
    return None


def _problem(dtype: torch.dtype, from_scores: bool, strategy: Strategy) -> dict[str, Tensor]:
    """Numbers in fp64 that the dtype can hold, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    n, m = _TOKENS[strategy]
    width = _RANK if from_scores else _DIM

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    shapes = {"q": (n, width), "k": (m, width), "v": (m, _DIM)}
    found = {name: randn(_BATCH, _HEADS, *shape).to(dtype).double() for name, shape in shapes.items()}
    if not from_scores:
        found["pivots"] = randn(_HEADS, _RANK, _DIM).double()
    found["log_masses"] = randn(_HEADS, _RANK).double().log_softmax(-1)
    found["query_masses"] = randn(_BATCH, _HEADS, n).double().softmax(-1)
    found["key_masses"] = randn(_BATCH, _HEADS, m).double().masked_fill(~_key_mask(m)[:, None], -torch.inf).softmax(-1)
    return found


def _key_mask(m: int) -> Tensor:
    """The end of the first sample is padding."""
    mask = torch.ones(_BATCH, m, dtype=torch.bool)
    mask[0, -3:] = False
    return mask


def _outcome(
    run: Any, problem: dict[str, Tensor], solve: Solve, device: torch.device, wide: torch.dtype, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The output, and the gradient of everything that has one."""
    leaves = {
        name: x.to(device, dtype if name in ("q", "k", "v") else wide).requires_grad_() for name, x in problem.items()
    }
    mask = _key_mask(leaves["k"].shape[2]).to(device)
    given: dict[str, Any] = {"pivots": None, **leaves}
    transport = Transport(**given, key_mask=mask)
    out = run(transport, solve).out
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    grads = torch.autograd.grad((out * weight).sum(), list(leaves.values()), materialize_grads=True)
    named = {f"the gradient of {name}": g for name, g in zip(leaves, grads, strict=True)}
    return {name: x.detach().cpu().double() for name, x in {"the output": out, **named}.items()}
