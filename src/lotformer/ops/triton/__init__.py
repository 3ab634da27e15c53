"""Triton kernels for CUDA and ROCm devices. Imported only where they can run."""

from __future__ import annotations

import importlib.util
import os

import torch

from ..problem import Result, Solve, Transport

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter runs the kernels on CPU tensors: for tests, not for use."""

_WHY_UNAVAILABLE: str | None = None
if importlib.util.find_spec("triton") is None:
    _WHY_UNAVAILABLE = "triton is not installed: pip install 'lotformer[gpu]'."
elif not INTERPRETED and not torch.cuda.is_available():
    _WHY_UNAVAILABLE = "no CUDA or ROCm device was found."
else:
    from . import op, selfcheck

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LARGEST = 256


def run(transport: Transport, solve: Solve) -> Result:
    return op.run(transport, solve)


def why_unavailable() -> str | None:
    return _WHY_UNAVAILABLE


def why_unsupported(transport: Transport, solve: Solve) -> str | None:
    _, _, _, _, rank, depth, width = transport.shape
    if transport.q.device.type != ("cpu" if INTERPRETED else "cuda"):
        return f"the tensors are on {transport.q.device.type}, the kernels run on CUDA and ROCm devices."
    if transport.q.dtype not in _DTYPES:
        return f"the inputs are {transport.q.dtype}, the kernels take float32, bfloat16 and float16."
    if max(rank, depth, width) > _LARGEST:
        return f"rank {rank} and head dims {depth}, {width}: the kernels take up to {_LARGEST} each."
    if solve.balance not in ("both", "keys", "none"):
        return f"the kernels do not know balance={solve.balance!r}."
    if torch._C._functorch.maybe_current_level() is not None:
        return "the kernels do not run under torch.func transforms."
    return None


def why_distrusted(transport: Transport, solve: Solve) -> str | None:
    return selfcheck.why_distrusted(transport, solve)
