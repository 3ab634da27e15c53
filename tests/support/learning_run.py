"""A small calibration or fine-tuning with a checkpoint, for processes that are to be interrupted.

    python learning_run.py calibrate|finetune FOLDER

prints every step as it is done.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lotformer


def learn(function: str, folder: Path, on_step: Any = None) -> nn.Module:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 4, 20, batch_first=True), 2)
    lotformer.convert(model, rank=6, solver="sinkhorn")
    batches = [torch.randn(4, 9, 24) for _ in range(6)]
    more: dict[str, Any] = {"evaluate_every": 20} if function == "calibrate" else {}
    getattr(lotformer, function)(model, batches, steps=120, checkpoint=folder / "run.pt", on_step=on_step, **more)
    return model


if __name__ == "__main__":
    learn(sys.argv[1], Path(sys.argv[2]), lambda now, *_: print(now, flush=True))
