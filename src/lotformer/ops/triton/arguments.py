"""Arguments that kernels share: pointers and strides of tensors under the names that kernels use, and the precision."""

from __future__ import annotations

import torch
from torch import Tensor


def rows(x: Tensor) -> Tensor:
    """Kernels read rows at any stride, the numbers of a row side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def given_or(x: Tensor | None, placeholder: Tensor) -> Tensor:
    """Kernels take a pointer in any case and do not follow the placeholder."""
    return placeholder if x is None else x


def broadcast_strides(x: Tensor | None) -> tuple[int, int]:
    if x is None:
        return 0, 0
    return x.stride(0), x.stride(1) if x.shape[1] > 1 else 0


def pivot_strides(z: Tensor) -> dict[str, int]:
    return {"z_b": z.stride(0) if z.dim() == 4 else 0, "z_h": 1 if z.dim() == 1 else z.stride(-3)}


def mass_stride(log_m: Tensor) -> dict[str, int]:
    return {"m_b": log_m.stride(0) if log_m.dim() == 3 else 0}


def value_strides(v: Tensor) -> dict[str, int]:
    return {"v_b": v.stride(0), "v_h": v.stride(1), "v_n": v.stride(2)}


def out_strides(x: Tensor) -> dict[str, int]:
    return {"out_b": x.stride(0), "out_h": x.stride(1), "out_n": x.stride(2)}


def precision() -> str:
    """Scores in full fp32: three TF32 products on NVIDIA's tensor cores, plain fp32 products elsewhere."""
    return "ieee" if torch.version.hip else "tf32x3"
