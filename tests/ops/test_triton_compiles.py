"""The Triton kernels compile for the GPUs we name, without a GPU, and none spills registers to memory.

Here a selection of kernels and sizes; `lotformer bench gpu-resources` compiles all.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton has no build for this platform")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("under the interpreter kernels are not compiled", allow_module_level=True)

from triton.backends.compiler import GPUTarget

from lotformer.ops.triton import resources

pytestmark = pytest.mark.long

KERNELS = {
    "sm_80, R32 D64, masks, masses, bf16": {"archs": (80,), "dtype": torch.bfloat16, "masked": True},
    "sm_80, R16 D128": {"archs": (80,), "ranks": (16,), "depths": (128,), "balances": ("keys",)},
    "sm_90, R32 D64": {"archs": (90,), "balances": ("keys",)},
    "sm_90, R32, scores": {"archs": (90,), "balances": ("keys",), "scores": (True,)},
    "sm_90, R64 D64": {"archs": (90,), "ranks": (64,), "balances": ("both",)},
    "sm_100, R32 D64": {"archs": (100,), "balances": ("keys",)},
    "sm_100, R128 D64": {"archs": (100,), "ranks": (128,), "balances": ("both",)},
}
"""Ranks and head dims decide about block sizes; pivots of samples are the same kernels, see below."""


@pytest.mark.parametrize("options", KERNELS.values(), ids=KERNELS)
def test_no_kernel_spills(options) -> None:
    rows = list(resources.measure(**{"depths": (64,), "ranks": (32,), "scores": (False,), **options}))
    for row in rows:
        print(f"{row.kernel} {row.solver}: {row.registers} registers, {row.shared} bytes shared")
    assert rows
    assert not [row for row in rows if row.stack > 0]


def test_kernels_compile_for_rocm() -> None:
    target = GPUTarget("hip", "gfx942", 64)
    fused = resources.record(64, 32, newton=False, strategy="fused")
    passes = resources.record(64, 32, newton=True, strategy="passes", balance="keys")
    for launched in dict.fromkeys(fused + passes):
        assert resources.compile_for(launched, target).asm["hsaco"]


def test_the_lengths_of_sequences_do_not_compile_kernels_again() -> None:
    short, long = (resources.record(64, 32, newton=False, strategy="passes", tokens=n) for n in (1000, 3001))
    assert short == long


@pytest.mark.parametrize("strategy", ["fused", "passes"])
def test_pivots_of_samples_do_not_compile_kernels_again(strategy) -> None:
    shared, own = (
        resources.record(64, 32, newton=False, strategy=strategy, pivots_of_samples=own) for own in (False, True)
    )
    assert shared == own
