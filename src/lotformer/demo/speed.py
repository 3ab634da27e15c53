"""Forward time of two encoders at growing length, alternating, best of several."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Speed:
    """Seconds of one forward pass on one sequence, softmax (PyTorch's fused kernel) and converted."""

    tokens: int
    softmax: float
    converted: float

    @property
    def gain(self) -> float:
        return self.softmax / self.converted


def compare_speed(
    softmax: nn.Module,
    converted: nn.Module,
    lengths: Sequence[int],
    *,
    budget: float = 6.0,
    on_length: Callable[[Speed], None] | None = None,
) -> list[Speed]:
    """Time both models on random tokens, batch 1.

    Positions repeat past the model's 512, which changes what it computes but not how long it takes. Each length
    is repeated, the two models in turn, until `budget` seconds are spent (twice at least), and the best counts.
    """
    found = []
    for length in lengths:
        inputs = _inputs(softmax, length)
        best = [float("inf"), float("inf")]
        start = time.perf_counter()
        rounds = 0
        while rounds < 2 or (time.perf_counter() - start < budget and rounds < 30):
            for index, model in enumerate((softmax, converted)):
                best[index] = min(best[index], _seconds(model, inputs))
            rounds += 1
        found.append(Speed(length, *best))
        if on_length is not None:
            on_length(found[-1])
    return found


def _inputs(model: nn.Module, length: int) -> dict[str, Tensor]:
    config: Any = model.config  # a plain module declares none
    generator = torch.Generator().manual_seed(length)
    return {
        "input_ids": torch.randint(1000, config.vocab_size, (1, length), generator=generator),
        "position_ids": torch.arange(length)[None] % config.max_position_embeddings,
        "token_type_ids": torch.zeros(1, length, dtype=torch.long),
    }


@torch.inference_mode()
def _seconds(model: nn.Module, inputs: dict[str, Tensor]) -> float:
    start = time.perf_counter()
    model(**inputs)
    return time.perf_counter() - start
