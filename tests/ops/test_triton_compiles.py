"""Every Triton kernel compiles for the GPUs we name, without a GPU, and none spills registers to memory."""

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


@pytest.mark.parametrize("depth", resources.DEPTHS, ids="D{}".format)
@pytest.mark.parametrize("rank", resources.RANKS, ids="R{}".format)
@pytest.mark.parametrize("arch", resources.CUDA_ARCHITECTURES, ids="sm_{}".format)
def test_no_kernel_spills(arch: int, rank: int, depth: int) -> None:
    rows = list(resources.measure((arch,), (depth,), (rank,)))
    for row in rows:
        print(f"{row.kernel} {row.solver}: {row.registers} registers, {row.shared} bytes shared")
    assert rows
    assert not [row for row in rows if row.stack > 0]


def test_masks_and_masses_in_half_precision_do_not_spill_either() -> None:
    rows = list(resources.measure((80,), (64,), (32,), dtype=torch.bfloat16, masked=True))
    assert not [row for row in rows if row.stack > 0]


def test_kernels_compile_for_rocm() -> None:
    target = GPUTarget("hip", "gfx942", 64)
    for strategy in ("fused", "passes"):
        for launched in resources.record(64, 32, newton=strategy == "passes", strategy=strategy):
            assert resources.compile_for(launched, target).asm["hsaco"]


def test_the_lengths_of_sequences_do_not_compile_kernels_again() -> None:
    short, long = (resources.record(64, 32, newton=False, strategy="passes", tokens=n) for n in (1000, 3001))
    assert short == long
