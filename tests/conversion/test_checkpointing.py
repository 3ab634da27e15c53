"""Models run their blocks again in the backward pass, as their libraries do it: gradients do not change by a bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lotformer.models  # it makes torchvision importable and registers the models

# isort: split
import timm
from transformers import Trainer, TrainingArguments

import lotformer
from lotformer.conversion.calling import call
from lotformer.data.batches import main_tensor
from support.cpu_kernel import needs_kernel
from support.small_models import SMALL

pytestmark = [needs_kernel, pytest.mark.small_windows]

REENTRANT = pytest.mark.parametrize("use_reentrant", [False, True], ids=["not reentrant", "reentrant"])
CONVERSIONS: dict[str, dict[str, Any]] = {
    "as converted by default": {},
    "sinkhorn, doubly stochastic": {"solver": "sinkhorn", "balance": "both"},
    "newton, no window": {"solver": "newton", "balance": "both", "window": None, "key_masses": "query-aware"},
    "newton, keys": {"solver": "newton", "balance": "keys", "key_masses": "linear"},
}


def gradients(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    torch.manual_seed(3)  # of dropout
    model.zero_grad()
    out = main_tensor(call(model, batch))
    (out * torch.arange(out.numel()).sin().view(out.shape)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert any("mechanism" in name and grad.any() for name, grad in expected.items())
    for name, grad in expected.items():
        assert grad.isfinite().all(), name
        assert torch.equal(found[name], grad), name


@REENTRANT
@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_a_text_encoder_of_hugging_face(conversion: str, use_reentrant: bool) -> None:
    small = SMALL["bert"]
    model, batch = small.build(), small.batch()
    lotformer.convert(model, rank=4, **CONVERSIONS[conversion])
    model.train()
    expected = gradients(model, batch)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert model.is_gradient_checkpointing
    assert_same(gradients(model, batch), expected)


@pytest.mark.parametrize("name", ["vit", "marian"])
def test_other_models_of_hugging_face(name: str) -> None:
    model, batch = SMALL[name].build(), SMALL[name].batch()
    lotformer.convert(model, rank=4)
    model.train()
    expected = gradients(model, batch)
    model.gradient_checkpointing_enable()
    assert_same(gradients(model, batch), expected)


@REENTRANT
def test_a_step_of_trainer(use_reentrant: bool, tmp_path: Path) -> None:
    started = SMALL["bert-classifier"].build()
    lotformer.convert(started, rank=4)
    rows = [
        {
            "input_ids": nn.functional.pad(torch.randint(3, 60, (n,)), (0, 9 - n)),
            "attention_mask": (torch.arange(9) < n).long(),
            "labels": n % 2,
        }
        for n in (9, 5, 7, 9, 6, 4, 9, 8)
    ]
    trained = []
    for checkpointing in (False, True):
        model = copy.deepcopy(started)
        settings = TrainingArguments(
            str(tmp_path),
            max_steps=2,
            per_device_train_batch_size=4,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            gradient_checkpointing=checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": use_reentrant},
        )
        Trainer(model, settings, train_dataset=rows).train()
        trained.append({name: p.detach() for name, p in model.named_parameters()})
    assert any(not torch.equal(p, trained[0][name]) for name, p in started.named_parameters())
    assert_same(trained[1], trained[0])


def test_a_converted_vision_transformer_of_timm() -> None:
    model, batch = SMALL["timm-vit"].build(), SMALL["timm-vit"].batch()
    lotformer.convert(model, rank=4)
    model.train()
    expected = gradients(model, batch)
    model.set_grad_checkpointing(True)
    assert_same(gradients(model, batch), expected)


VISION: dict[str, dict[str, Any]] = {
    "lot_deit_tiny_patch16_224": {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3},
    "lot_swin_tiny": {
        "img_size": 32, "window_size": 2, "embed_dim": 8, "depths": (1, 2, 2, 1), "num_heads": (1, 2, 2, 2),
    },
    "lot_pvt_tiny": {"img_size": 32, "embed_dims": (8, 16, 16, 24), "depths": (1, 1, 2, 1), "num_heads": (1, 2, 2, 3)},
}  # fmt: skip


@pytest.mark.parametrize("name", VISION)
def test_a_vision_model_of_ours(name: str) -> None:
    model = timm.create_model(name, num_classes=5, **VISION[name]).train()
    x = torch.randn(2, 3, 32, 32)
    expected = gradients(model, x)
    model.set_grad_checkpointing(True)
    assert_same(gradients(model, x), expected)
