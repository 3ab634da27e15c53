"""Batches that cannot be learned from are refused in words about the batches; others work wherever they were made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import lotformer
from support.small_models import SMALL

pytestmark = pytest.mark.small_windows

WAYS: dict[str, Callable[..., Any]] = {"calibrate": lotformer.calibrate, "finetune": lotformer.finetune}
both_ways = pytest.mark.parametrize("learn", WAYS.values(), ids=WAYS)


def converted(kind: str) -> nn.Module:
    model = SMALL[kind].build()
    lotformer.convert(model, rank=4)
    return model


def texts(count: int = 2) -> list[dict[str, Tensor]]:
    return [dict(SMALL["bert"].batch()) for _ in range(count)]


def pixels() -> Tensor:
    return SMALL["vit"].batch()["pixel_values"].clone()


def whisper() -> nn.Module:
    sizes = {"d_model": 24, "vocab_size": 60, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 3,
             "decoder_attention_heads": 3, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "num_mel_bins": 8,
             "max_source_positions": 20, "max_target_positions": 20, "pad_token_id": 0, "bos_token_id": 1,
             "eos_token_id": 2, "decoder_start_token_id": 1}  # fmt: skip
    model = transformers.WhisperModel(transformers.WhisperConfig(**sizes)).eval()
    lotformer.convert(model, rank=4)
    return model


@both_ways
@pytest.mark.parametrize(
    ("cut", "why"),
    {
        "no samples": (lambda b: {name: x[:0] for name, x in b.items()}, r"a batch is empty: `input_ids` is \(0, 9\)"),
        "no tokens": (lambda b: {name: x[:, :0] for name, x in b.items()}, r"a batch is empty: `input_ids` is \(2, 0"),
        "no inputs": (lambda b: {}, "a batch is empty: there is no tensor in it"),
        "no items": (lambda b: [], "got an empty list"),
    }.values(),
    ids=["no samples", "no tokens", "no inputs", "no items"],
)
def test_an_empty_batch_is_refused(learn: Callable[..., Any], cut: Callable[..., Any], why: str) -> None:
    given = texts()
    with pytest.raises((ValueError, TypeError), match=why):
        learn(converted("bert"), [given[0], cut(given[1])], steps=2)


@both_ways
def test_inputs_that_are_not_finite_are_blamed_on_the_batch(learn: Callable[..., Any]) -> None:
    dirty = pixels()
    dirty[0, 0, 0, 0] = torch.nan
    named = "batch 1: " if learn is lotformer.calibrate else ""
    with pytest.raises(ValueError, match=f"{named}its inputs are not finite, there is NaN or inf in `pixel_values`"):
        learn(converted("vit"), [{"pixel_values": x} for x in (pixels(), dirty)], steps=2)


@both_ways
def test_weights_that_are_not_finite_are_blamed_on_the_model(learn: Callable[..., Any]) -> None:
    model = converted("bert")
    with torch.no_grad():
        model.embeddings.word_embeddings.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"inputs are finite, but .* look at .* weights"):
        learn(model, texts(), steps=2)


@both_ways
def test_a_decoder_without_inputs_is_named(learn: Callable[..., Any]) -> None:
    features = torch.randn(2, 8, 40)
    with pytest.raises(ValueError, match=r"WhisperModel does not run on .*`input_features`.*decoder_input_ids"):
        learn(whisper(), [{"input_features": features}] * 2, steps=2)
    with pytest.raises(ValueError, match=r"does not run on a batch of the tensor: it needs `decoder_input_ids`"):
        learn(whisper(), [features] * 2, steps=2)
    with pytest.raises(ValueError, match="BertModel does not run on a batch of `attention_mask`: it needs `input_ids`"):
        learn(converted("bert"), [{"attention_mask": torch.ones(2, 9).long()}] * 2, steps=2)


@both_ways
def test_tensors_of_inference_mode_can_be_learned_from(learn: Callable[..., Any]) -> None:
    with torch.inference_mode():
        given = [x.clone() for x in (pixels(), pixels())]
        ids = [{name: x.clone() for name, x in batch.items()} for batch in texts()]
    assert given[0].is_inference()
    assert learn(converted("vit"), [{"pixel_values": x} for x in given], steps=2).steps == 2
    model, encoder = converted("timm-vit"), converted("bert")
    with torch.inference_mode():
        assert learn(model, given, steps=2).steps == 2
        assert learn(encoder, ids, steps=2).steps == 2


@both_ways
def test_a_model_of_inference_mode_is_refused(learn: Callable[..., Any]) -> None:
    with torch.inference_mode():
        model = converted("bert")
    with pytest.raises(ValueError, match="the model was made in inference mode"):
        learn(model, texts(), steps=2)
