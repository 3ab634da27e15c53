"""A small converted encoder and batches for it to learn from."""

from __future__ import annotations

import torch

import lotformer
from support.small_models import SMALL


def batches(count: int = 6) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    result = []
    for _ in range(count):
        mask = torch.ones(4, 9, dtype=torch.long)
        mask[2, 6:] = 0
        result.append({"input_ids": torch.randint(3, 60, (4, 9), generator=generator), "attention_mask": mask})
    return result


def bert(**options) -> torch.nn.Module:
    model = SMALL["bert"].build()
    torch.manual_seed(0)
    lotformer.convert(model, rank=6, **options)
    return model
