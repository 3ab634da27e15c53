"""Tiny random models of every kind that can be converted, with inputs, built from configs alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import timm
import torch
import transformers
from torch import nn
from transformers import logging

from lotformer.conversion.calling import call
from lotformer.data.batches import main_tensor

logging.set_verbosity_error()
logging.disable_progress_bar()

_TEXT = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "vocab_size": 60,
    "max_position_embeddings": 40,
}
_IMAGE = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "image_size": 20,
    "patch_size": 5,
}
_SEQ2SEQ = {
    "vocab_size": 60,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 20,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "forced_eos_token_id": 2,
}


@dataclass(frozen=True)
class Small:
    """A model, a batch for it, and how many attention modules conversion should find and leave."""

    build: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Any] | torch.Tensor]
    converted: int = 2
    skipped: int = 0


def _ids(length: int = 9) -> torch.Tensor:
    return torch.randint(3, 60, (2, length), generator=torch.Generator().manual_seed(1))


def _text() -> dict[str, torch.Tensor]:
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    return {"input_ids": _ids(), "attention_mask": mask}


def _pair() -> dict[str, torch.Tensor]:
    return {**_text(), "decoder_input_ids": _ids(4)}


def _pixels() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, 20, 20, generator=torch.Generator().manual_seed(1))}


def _randomised(model: nn.Module) -> nn.Module:
    """Larger weights than a fresh initialisation, so that what attention does shows in the output."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.requires_grad:  # sinusoids are rebuilt, not saved
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def _hf(kind: str, config: type, settings: dict[str, Any]) -> Callable[[], nn.Module]:
    return lambda: _randomised(getattr(transformers, kind)(config(**settings)))


def torch_encoder(**options: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(24, 4, 20, batch_first=True, **options)
    encoder = nn.TransformerEncoder(layer, 2)
    _randomised(encoder)
    return encoder


def _timm() -> nn.Module:
    return _randomised(
        timm.create_model(
            "vit_tiny_patch16_224", img_size=20, patch_size=5, embed_dim=24, num_heads=3, depth=2, num_classes=5
        )
    )


def _eva(**options: Any) -> Callable[[], nn.Module]:
    sizes = {"img_size": 20, "patch_size": 5, "embed_dim": 24, "num_heads": 3, "depth": 2, "num_classes": 5}
    return lambda: _randomised(timm.models.eva.Eva(**sizes, use_rot_pos_emb=True, **options))


_DISTIL = {"dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 20, "vocab_size": 60, "max_position_embeddings": 40}
_MODERN = {**_TEXT, "global_attn_every_n_layers": 2, "local_attention": 4, "pad_token_id": 0, "cls_token_id": 1,
           "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip

SMALL: dict[str, Small] = {
    "bert": Small(_hf("BertModel", transformers.BertConfig, _TEXT), _text),
    "bert-classifier": Small(_hf("BertForSequenceClassification", transformers.BertConfig, _TEXT), _text),
    "roberta": Small(_hf("RobertaModel", transformers.RobertaConfig, {**_TEXT, "pad_token_id": 1}), _text),
    "xlm-roberta": Small(_hf("XLMRobertaModel", transformers.XLMRobertaConfig, {**_TEXT, "pad_token_id": 1}), _text),
    "distilbert": Small(_hf("DistilBertModel", transformers.DistilBertConfig, _DISTIL), _text),
    "electra": Small(_hf("ElectraModel", transformers.ElectraConfig, {**_TEXT, "embedding_size": 24}), _text),
    "modernbert": Small(_hf("ModernBertModel", transformers.ModernBertConfig, _MODERN), _text, 1, 1),
    "vit": Small(_hf("ViTModel", transformers.ViTConfig, _IMAGE), _pixels),
    "deit": Small(_hf("DeiTModel", transformers.DeiTConfig, _IMAGE), _pixels),
    "marian": Small(_hf("MarianMTModel", transformers.MarianConfig, _SEQ2SEQ), _pair, 2, 4),
    "bart": Small(_hf("BartModel", transformers.BartConfig, _SEQ2SEQ), _pair, 2, 4),
    "timm-vit": Small(_timm, lambda: _pixels()["pixel_values"]),
    "timm-eva": Small(_eva(qkv_fused=False), lambda: _pixels()["pixel_values"]),
    "timm-rope": Small(_eva(attn_type="rope", num_reg_tokens=2), lambda: _pixels()["pixel_values"]),
    "torch-encoder": Small(torch_encoder, lambda: torch.randn(2, 9, 24, generator=torch.Generator().manual_seed(1))),
}


def output(model: nn.Module, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        return main_tensor(call(model, batch))
