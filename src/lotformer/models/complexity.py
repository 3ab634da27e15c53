"""Parameters and multiply-adds of a vision model."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ..attention.lot import LOT
from ..layers import AttentionLayer
from ..nn.depthwise import DepthwiseMixing


@dataclass(frozen=True)
class Complexity:
    """`macs` are what papers on vision models call FLOPs: multiply-adds of products and convolutions for one image."""

    parameters: int
    macs: float


def complexity(model: nn.Module, image_size: tuple[int, int] = (224, 224)) -> Complexity:
    """Count in one pass over a black image.

    All is counted by its definition, whatever kernel would run it, and LOT with queries and keys, which it need not
    form.

    Element-wise work is left out, as usual: softmax's exponentials and Sinkhorn's sweeps alike.
    """
    twin = copy.deepcopy(model).cpu().eval()
    for module in twin.modules():
        if isinstance(module, LOT):
            # in torch's own products, which the counter knows
            module.config = replace(module.config, backend="reference")
        if isinstance(module, DepthwiseMixing):
            module.conv.register_forward_hook(_watch)  # likewise
        if isinstance(module, AttentionLayer):
            module.qkv.register_forward_hook(_watch)  # queries and keys are formed, where LOT could do without
    # the counter knows products, not the fused softmax of a CPU
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        twin(torch.zeros(1, 3, *image_size))
    return Complexity(sum(p.numel() for p in model.parameters()), counter.get_total_flops() / 2)


def _watch(module: nn.Module, args: Any, output: Any) -> None:
    """A hook, for which a module is called as PyTorch's own."""
